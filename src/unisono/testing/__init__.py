"""The plugin of pytest: `@pytest.mark.ranks(4)` runs a test on four ranks. docs/testing.md is for users.

    plugin.py    what pytest loads: options, fixtures, hooks; it imports the others when a test needs them
    marker.py    the arguments of the marker
    pool.py      in pytest's process: starts ranks, gives them a test, waits, ends those that hang
    rank.py      in a rank: a pytest session that runs the tests it is given
    groups.py    in a rank: the groups, kept from test to test
    merge.py     one report from those of the ranks
    channel.py   messages between them
"""
