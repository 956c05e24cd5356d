"""Pipelines: a schedule is a list of actions per rank; it is proved, timed, drawn and run."""
