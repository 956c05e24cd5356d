"""The cost of a plan on a machine, and the choice of an algorithm.

machine.py      the figures of the machine, measured or default
simulation.py   the times of a plan's steps
plan_cost.py    a plan's messages, bytes and seconds
tuner.py        the algorithm for an operation, a size and a placement
"""
