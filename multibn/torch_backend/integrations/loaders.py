"""Read a training loader a second time, while training iterates over it."""

import copy
from typing import Any

from torch.utils.data import DataLoader


def second_reader(data_loader: Any, /) -> Any:
    """Return a loader of the same data with separate workers, for a loop inside a loop.

    A DataLoader with persistent workers has only one iterator. A second loop over the same loader
    would restart the first loop's iterator.
    """
    if not isinstance(data_loader, DataLoader):
        return data_loader
    reader = copy.copy(data_loader)
    reader._iterator = None
    return reader
