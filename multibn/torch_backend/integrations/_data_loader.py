"""A second pass over the training data while the first one is going on."""

import copy
from typing import Any

from torch.utils.data import DataLoader


def second_reader(data_loader: Any, /) -> Any:
    """A loader of the same data with workers of its own.

    A DataLoader with persistent workers has one iterator, which a second loop would restart under
    the training loop's feet.
    """
    if not isinstance(data_loader, DataLoader):
        return data_loader
    reader = copy.copy(data_loader)
    reader._iterator = None
    return reader
