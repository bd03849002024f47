"""The passes that touch the whole activation, one file per array library, the same four names.

`local_moments`, `normalize`, `backward_sums` and `input_gradient` see an activation and per-channel
coefficients; they know nothing of processes, weights or gradients. `generic` is the reference and
works for every library of the array API standard.
"""
