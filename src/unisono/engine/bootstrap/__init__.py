"""How ranks form a group: from an address to an engine that reaches every other rank.

rendezvous.py   the whole rendezvous     target.py       the address: URL, arguments, environment
opening.py      opens the store          numbering.py    which process is which rank
membership.py   the processes of the ranks, and which share a host
memory.py       shares the memory of a host                 admission.py  limits unauthenticated peers
connections.py  connects ranks of different hosts           connecting.py several connections at once
liveness.py     detects deaths while ranks wait             failures.py   reports the first failure to all
engine.py       makes the engine         interfaces.py   which address of this host others use
launchers.py    the address under MPI and Slurm
tls_relay.py    encryption between hosts                    sockets.py    sockets until the engine takes them
"""
