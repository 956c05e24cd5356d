"""mpi4py.bench is unisono.mpi4py.bench, and a program: `python -m mpi4py.bench helloworld`."""

from unisono.mpi4py.bench import helloworld, main, ringtest  # noqa: F401

if __name__ == "__main__":
    main()
