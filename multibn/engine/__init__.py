"""The engine: moments of a batch, merged over ranks; one message each way; what is kept.

Imports kernels and communicators, and no framework.
"""
