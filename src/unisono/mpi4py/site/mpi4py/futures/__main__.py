"""`python -m mpi4py.futures script.py`: rank 0 runs the script, the others are its workers."""

from unisono.mpi4py.futures.command import main

if __name__ == "__main__":
    main()
