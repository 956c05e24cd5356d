#error "Unisono is no MPI library: it has no C communicators. Build this against mpi4py and MPI, and start it with mpiexec."
