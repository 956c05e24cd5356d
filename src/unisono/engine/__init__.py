"""The engine's wing: collectives between processes, without PyTorch.

base/         checks, timeouts, limits, proofs of who a peer is: what all rooms use
environment/  the settings, and the one reader of the environment
operations/   the kinds of calls, the reductions           memory/     arrays and their addresses
store/        the stores and their protocol                encoding/   objects as bytes
costs/        the price of a plan, the choice of one       backends/   MPI, Gloo and NCCL behind one interface
bootstrap/    how the ranks of a group meet                diagnosis/  the report of a failure, and its text
group/        `Group`: the calls of the user
"""
