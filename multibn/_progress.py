"""A progress bar, where tqdm is installed."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress(show: bool, description: str, total: int | None) -> Iterator[Callable[[], object]]:
    """A function to call after each batch; a bar only if it is to `show`."""
    if not show or find_spec("tqdm") is None:
        if show:
            print(f"{description}: no progress bar, run pip install tqdm for one", file=sys.stderr)
        yield lambda: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc=description, unit="batch") as bar:
        yield bar.update
