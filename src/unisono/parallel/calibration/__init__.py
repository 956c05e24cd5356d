"""`unisono calibrate --compute`: measures what the operators of training take on this machine.

jobs.py               runs the jobs, keeps the figures, shows them
operator_worker.py    a rank that times operators;  operator_cases.py: the calls
runtime_worker.py     one of two ranks that time the runtime
worker.py             what both do around it
reference_models.py   steps that show what a training adds to its operators
"""
