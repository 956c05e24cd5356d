"""What a step of training takes on this machine, before it runs: operators of a recorded step, priced.

operator_kinds.py   the class of an operator, and its size
trace.py            forward, backward and update on shapes: which operators run, in which call of a module
traced_rows.py      traces of other numbers of rows
operator_prices.py  seconds of traced operators
traced_step.py      what a trace consists of
exchanges.py        what the context axis and the expert axis exchange, priced
rank_clock.py       the seconds of one rank of a pipeline
collectives.py      what collectives and messages take
link.py             what collectives take by two figures of a network
step_time.py        the seconds of a step under a plan, by cause
parameter_work.py   of it: units, replicas, updates, swapping
forecast.py         StepForecast; forecast_check.py: the first steps of a run beside it
"""
