"""Executors of mpi4py.futures: MPICommExecutor with `comm` as an argument, else MPIPoolExecutor."""

import sys
import time

from mpi4py import MPI
from mpi4py.futures import (
    BrokenExecutor,
    MPICommExecutor,
    MPIPoolExecutor,
    ThreadPoolExecutor,
    as_completed,
    get_comm_workers,
    wait,
)
from mpi4py.util.pool import Pool

GREETING = []


class Unpicklable:
    def __reduce__(self):
        raise TypeError("not this one")


def square(x):
    return x * x


def fail(x):
    raise KeyError(x)


def greet(word):
    get_comm_workers().Barrier()  # it ends only if all workers are here at the same time
    GREETING.append(word)


def greeted():
    return GREETING


def workers():
    return get_comm_workers().size


def check(executor, expected):
    assert executor.num_workers == expected
    assert list(executor.map(square, range(50))) == [x * x for x in range(50)]
    assert list(executor.map(square, range(50), chunksize=7)) == [x * x for x in range(50)]
    assert sorted(executor.map(square, range(9), unordered=True)) == [x * x for x in range(9)]
    assert list(executor.starmap(pow, [(2, 5), (3, 2)], buffersize=1)) == [32, 9]
    assert executor.submit(workers).result() == expected
    error = executor.submit(fail, 7).exception()
    assert isinstance(error, KeyError) and (expected == 0 or error.args == (7,))
    for call in ((square, Unpicklable()), (Unpicklable,)):
        if MPI.COMM_WORLD.size > 1:
            assert isinstance(executor.submit(*call).exception(), TypeError)
    futures = [executor.submit(time.sleep, 0.01) for _ in range(5)]
    assert set(as_completed(futures)) == set(futures)
    assert not wait(futures).not_done


def main():
    size = max(1, MPI.COMM_WORLD.size - 1)
    if "comm" in sys.argv:
        with MPICommExecutor(MPI.COMM_WORLD, root=0) as executor:
            if executor is not None:
                check(executor, size)
                print("all futures ok")
        MPI.COMM_WORLD.Barrier()
        return
    with MPIPoolExecutor() as executor, MPIPoolExecutor(initializer=greet, initargs=("hello",)) as greeter:
        check(executor, size)
        assert greeter.submit(greeted).result() == ["hello"]
    with ThreadPoolExecutor(3) as openers:
        list(openers.map(lambda word: MPIPoolExecutor(initializer=greet, initargs=word).bootup(), "abc"))
    broken = MPIPoolExecutor(initializer=fail, initargs=(1,))
    assert isinstance(broken.submit(square, 1).exception(), BrokenExecutor)
    with Pool() as pool:
        assert pool.map(square, range(10)) == [x * x for x in range(10)]
        assert pool.starmap_async(pow, [(2, 3)]).get(60) == [8]
    pool.join()
    print("all futures ok")


if __name__ == "__main__":
    main()
