"""What a plan costs on a machine, and which algorithm is therefore chosen.

machine.py  what the machine can do, measured or assumed     timing.py  when the steps of a plan happen
price.py    a plan's messages, bytes and seconds
choice.py   the algorithm for an operation, a size and a placement
"""
