"""How ranks come together: from an address to an engine that reaches every other rank.

rendezvous.py   the whole of it        target.py       where to meet: URL, arguments, environment
opening.py      the store is opened    numbering.py    which process is which rank
membership.py   the processes of the ranks, and which share a host
memory.py       the memory of a host is handed out          admission.py  which process gets it
connections.py  ranks of other hosts are connected          connecting.py many at once, until all are there
liveness.py     a death is noticed while others wait        failures.py   the first failure is told to all
engine.py       the engine is made     interfaces.py  which address others reach this host by
tls_relay.py    encryption between hosts                    sockets.py    sockets that are being handed over
"""
