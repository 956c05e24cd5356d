"""The kinds of calls and the reduction operations; the engine has the same numbers."""
