"""One record of a failure: what happened, to which rank, and the status of every rank.

report    FaultReport, the record of a fault
read      engine -> FaultReport
render    FaultReport -> text and exception
calls     the text of a call from its numbers; which ranks made another call than most
cause     the close reason: why a rank leaves its group
site      where in the caller's source a call was made
uncaught  an error that ends a rank -> the launcher
"""
