"""One account of a failure: what happened, to whom, where every rank was.

report    FaultReport, the record of a fault
read      engine -> FaultReport
render    FaultReport -> text and exception
calls     a call by its numbers; which ranks called something else than most
cause     why a rank leaves its group
site      where in the caller's source a call was made
uncaught  an error that ends a rank -> the launcher
"""
