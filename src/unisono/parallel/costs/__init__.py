"""What a step of training takes on this machine, before it runs: operators of a recorded step, priced.

task.py             what is trained: a model, its loss, optimizer and batch; its cuts, programs and traces
trace.py            forward, backward and update on shapes: which operators run, in which call of a module
operators.py        the class of an operator, its size, and its seconds
collectives.py      what collectives and messages take, and what axes exchange
step_parts.py       all that is needed to price a step, for a job on some hosts; what the model's Python adds
parameter_work.py   units, replicas, updates, swapping, compressed gradients
step_time.py        the seconds of a step under a plan, by cause
predictor.py        StepPredictor: from a model and plans to forecasts
forecast.py         StepForecast, and the first steps of a run beside it
"""
