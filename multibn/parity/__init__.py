"""The surfaces of both frameworks against a float64 oracle and against each other.

`multibn parity` is the command; `multibn.parity.command` runs it. The ranks are processes under
torchrun and mpiexec that only train and write arrays down; the comparison is made afterwards, in
the process that launched them, which imports no framework.
"""
