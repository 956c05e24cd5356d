"""How ranks form a group: from an address to an engine that reaches every other rank.

rendezvous.py         the whole rendezvous
init_method.py        the address: URL, arguments, environment
launchers.py          the address under MPI and Slurm
store_setup.py        opens the store
rank_assignment.py    which process has which rank
peer_info.py          what each rank publishes about itself, and which ranks share a host
shared_memory.py      maps one memory into the ranks of a host
host_connections.py   connects ranks of different hosts
connector_pool.py     several connections at once
peer_sockets.py       the sockets until the engine takes them
tls_relay.py          encryption between hosts
interfaces.py         which address of this host others use
admission.py          limits unauthenticated connections
liveness.py           detects deaths while ranks wait
failures.py           reports the first failure to all
engine.py             makes the engine
"""
