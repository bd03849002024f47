"""The oracle's batch norm without weight and bias, for tests that need only its outputs."""

from collections.abc import Sequence

import numpy as np

from multibn.parity.oracle import Array, batch_norm


def normalized(xs: Sequence[Array], eps: float) -> list[Array]:
    """The ranks' batches `xs`, each `(N, C, *spatial)`, by the statistics of all of them."""
    C = xs[0].shape[1]
    return batch_norm(xs, xs, np.ones(C), np.zeros(C), eps=eps).y
