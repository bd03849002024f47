"""Handwritten digits: the same split, and the same sequence of batches, for every run.

scikit-learn includes the 1,797 images of 8x8 pixels: no download.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from sklearn.datasets import load_digits

NUM_TRAIN = 1400  # the other 397 images are the test set
BATCH_SIZE = 8  # over all ranks; small, so that the statistics of one rank's part are poor
STEPS_PER_EPOCH = NUM_TRAIN // BATCH_SIZE


class Digits(NamedTuple):
    """Images `(N, 1, 8, 8)` with values in [0, 1], and labels `(N,)`."""

    x: np.ndarray[Any, Any]
    y: np.ndarray[Any, Any]


def load(dtype: str) -> tuple[Digits, Digits]:
    """Return the training set and the test set."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    x = (pixels[order] / 16).reshape(-1, 1, 8, 8).astype(dtype)
    y = labels[order]
    return Digits(x[:NUM_TRAIN], y[:NUM_TRAIN]), Digits(x[NUM_TRAIN:], y[NUM_TRAIN:])


def batches(num_steps: int, rank: int, size: int) -> Iterator[np.ndarray[Any, Any]]:
    """Yield this rank's part of each step's batch, as indices into the training set."""
    rng = np.random.default_rng(1)
    for step in range(num_steps):
        if step % STEPS_PER_EPOCH == 0:
            epoch = rng.permutation(NUM_TRAIN).reshape(STEPS_PER_EPOCH, BATCH_SIZE)
        yield np.split(epoch[step % STEPS_PER_EPOCH], size)[rank]
