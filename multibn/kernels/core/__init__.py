"""The compiled kernels for arrays in host memory: a C core, its memory and its threads."""
