"""Reads every packet of host 0 until one says that it was the last; could it read the secret?"""

import socket

seen = 0
with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as sock:
    sock.bind(("p0", 0))
    print("ready", flush=True)
    while not seen:
        packet = sock.recv(70000)
        if b"that is all" in packet:
            break
        seen += b"the weights of a model" in packet
print("read it" if seen else "saw nothing", flush=True)
