"""An object of the program calls MPI when Python deletes it, at the end."""

from unisono import MPI


class Reports:
    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm, self.itself = comm, self

    def __del__(self) -> None:
        self.comm.Barrier()
        total = self.comm.reduce(self.comm.rank)
        if self.comm.rank == 0:
            print("total", total)


reports = Reports(MPI.COMM_WORLD)
