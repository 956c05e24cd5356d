"""mpi4py.run is unisono.mpi4py.run, and a program: `python -m mpi4py.run script.py`."""

from unisono.mpi4py.run import main, run_command_line, set_abort_status  # noqa: F401

if __name__ == "__main__":
    main()
