"""A function whose examples run on ranks."""


def mean(group, x):
    """Average a number over the ranks.

    >>> group = getfixture("group")
    >>> mean(group, group.rank + 1.0)
    1.5
    """
    return float(group.all_reduce(x)) / group.size


def number(group):
    """Is not the same everywhere.

    >>> getfixture("rank")
    0
    """
