"""Compares the layers of both frameworks with a float64 oracle and with each other.

`multibn.parity.command` is the command `multibn parity`. Its ranks are processes under torchrun and
mpiexec that only train and write arrays to files. The process that launched them compares the
arrays afterwards, and imports no framework.
"""
