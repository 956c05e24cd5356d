"""How ranks form a group: from an address to an engine that reaches every other rank.

rendezvous.py   the whole rendezvous     init_method.py       the address: URL, arguments, environment
store_setup.py      opens the store          rank_assignment.py    which process is which rank
peer_info.py   the processes of the ranks, and which share a host
shared_memory.py       shares the memory of a host                 admission.py  limits unauthenticated peers
host_connections.py  connects ranks of different hosts           connector_pool.py several connections at once
liveness.py     detects deaths while ranks wait             failures.py   reports the first failure to all
engine.py       makes the engine         interfaces.py   which address of this host others use
launchers.py    the address under MPI and Slurm
tls_relay.py    encryption between hosts                    peer_sockets.py    sockets until the engine takes them
"""
