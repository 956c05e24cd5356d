"""Makes two hosts, prints their processes and that of the switch, and sleeps."""

import time

import hosts

with hosts.hosts(2) as net:
    print(net[0].pid, net[1].pid, net.switch.pid, flush=True)
    time.sleep(3600)
