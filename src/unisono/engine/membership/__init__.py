"""How the ranks of a group agree on the membership that follows it, after a fault or by will.

proposal    what a rank publishes: whom it holds alive, and how far the agreement is
agreement   the rules by which proposals become one decision; no clock, no engine
contact     what a rank knows about the others by itself: dead, stopped, late, cut off
eviction    why a rank was evicted
"""
