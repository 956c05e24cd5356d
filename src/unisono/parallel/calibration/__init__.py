"""`unisono calibrate --compute`: measures what the operators of training take on this machine.

jobs.py               runs the jobs, keeps the figures, shows them; a rank of a job
operators.py          times operators, and the calls that are timed
runtime.py            times the runtime on two ranks
shared_steps.py       times steps of ranks that train together
reference_models.py   steps that show what a training adds to its operators
"""
