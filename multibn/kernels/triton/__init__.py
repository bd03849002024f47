"""The Triton kernels for torch tensors on a GPU: passes, steps between them, and launches."""
