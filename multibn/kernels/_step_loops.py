"""The loops of the steps between the passes, compiled by numba; `generic` says what each step does.

Per-channel arrays come as addresses of `C` numbers side by side.
"""

# mypy: disallow-untyped-defs=False, check-untyped-defs=False

import numpy as np

from multibn.kernels._loops import Loop
from multibn.message import COUNT, WEIGHT

# No fused operations: each result is rounded, so that equal moments leave a variance of exactly 0.
_EXACT: set[str] = set()
REFUSED, NOT_FINITE = 1, 2  # what `unpack` returns for such a message


def _pack(mean, meansqr, packed, C, weight, count):
    for c in range(C):
        packed[c] = weight * mean[c]
        packed[C + c] = weight * meansqr[c]
    packed[2 * C + WEIGHT] = weight
    packed[2 * C + COUNT] = count


def _pack_moments(mean, var, packed, C, weight, count):
    for c in range(C):
        packed[c] = weight * mean[c]
        packed[C + c] = weight * (var[c] + mean[c] * mean[c])
    packed[2 * C + WEIGHT] = weight
    packed[2 * C + COUNT] = count


def _unpack(summed, mean, var, total_count, element_weight, C, weight, count):
    total_weight = summed[2 * C + WEIGHT]
    divisor = 1.0 if total_weight == 0.0 else total_weight
    finite = True
    for c in range(C):
        mean[c] = summed[c] / divisor
        difference = summed[C + c] / divisor - mean[c] * mean[c]
        var[c] = 0.0 if difference < 0.0 else difference  # NaN stays
        finite &= np.isfinite(summed[C + c])
    total_count[0] = summed[2 * C + COUNT]
    element_weight[0] = weight / (max(count, 1.0) * divisor)
    if np.isnan(total_count[0]):
        return REFUSED
    return 0 if finite else NOT_FINITE


def _affine(var, weight, bias, scale, shift, C, has_weight, has_bias, eps):
    for c in range(C):
        invstd = 1.0 / np.sqrt(var[c] + eps)
        scale[c] = invstd * weight[c] if has_weight else invstd
        shift[c] = bias[c] if has_bias else 0.0


def _finish_backward_sums(sums, var, sum_dy, sum_dy_xhat, C, parts, eps):
    for c in range(C):
        sum_dy[c] = 0.0
        sum_dy_xhat[c] = 0.0
    for p in range(parts):
        for c in range(C):
            sum_dy[c] += sums[2 * p * C + c]
            sum_dy_xhat[c] += sums[(2 * p + 1) * C + c]
    for c in range(C):
        sum_dy_xhat[c] /= np.sqrt(var[c] + eps)


def _gradient_coefficients(
    var, sum_dy, sum_dy_xhat, weight, dy_scale, x_scale, shift, C, has_weight, eps, element_weight
):
    for c in range(C):
        invstd = 1.0 / np.sqrt(var[c] + eps)
        scale = invstd * weight[c] if has_weight else invstd
        pull = -scale * element_weight
        dy_scale[c] = scale
        x_scale[c] = pull * invstd * sum_dy_xhat[c]
        shift[c] = pull * sum_dy[c]


def _move_averages(
    running_mean, running_var, mean, var, moved_mean, moved_var, C, momentum, factor
):
    for c in range(C):
        moved_mean[c] = (1.0 - momentum) * running_mean[c] + momentum * mean[c]
        moved_var[c] = (1.0 - momentum) * running_var[c] + momentum * (var[c] * factor)


# "x" is the dtype of parameters and running statistics.
LOOPS: dict[str, Loop] = {
    "pack": Loop(_pack, "www", 1, _EXACT, floats=2),
    "pack_moments": Loop(_pack_moments, "www", 1, _EXACT, floats=2),
    "unpack": Loop(_unpack, "wwwww", 1, _EXACT, floats=2, returns=True),
    "affine": Loop(_affine, "wxxww", 3, _EXACT, floats=1),
    "finish_backward_sums": Loop(_finish_backward_sums, "wwww", 2, _EXACT, floats=1),
    "gradient_coefficients": Loop(_gradient_coefficients, "wwwxwww", 2, _EXACT, floats=2),
    "move_averages": Loop(_move_averages, "xxwwxx", 1, _EXACT, floats=2),
}
