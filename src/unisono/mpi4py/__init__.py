"""The package mpi4py beside its module MPI, which is unisono.mpi: what `unisono run --replace mpi4py` needs.

    site       a package mpi4py for PYTHONPATH, whose modules stand for those here
    rc         settings that a program makes before it imports MPI
    package    the version, and how mpi4py was built
    run        `python -m mpi4py`; `python -m unisono.mpi4py script.py` under any launcher
    bench      `python -m mpi4py.bench helloworld`
    futures    executors whose workers are ranks
    pool       multiprocessing.Pool over them
    pkl5       communicators that send buffers of pickles out of band
    dtlib      datatypes of NumPy and of MPI
    typing     the types of arguments
    sync       mutexes, counters and conditions of ranks

Nothing here imports MPI before the program does, but for the modules that use it.
"""
