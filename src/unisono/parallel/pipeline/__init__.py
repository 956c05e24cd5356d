"""Pipelines: a schedule is a list of actions per rank, which is proved, timed, drawn and run."""
