"""Named arrays between two jobs: one publishes them with their cuts, others take them in cuts of their own.

    boxes < pieces < meeting < publication, subscription

`boxes` is the arithmetic of cuts. A subscription is one more group, of the publisher's ranks and those of the
subscriber. On one host a subscriber copies out of the publisher's memory; between hosts the ranks that hold
the pieces send them. Nothing here runs in a program that does not publish.
"""
