"""A progress bar, where tqdm is installed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec


@contextmanager
def progress(show: bool, description: str, total: int | None) -> Iterator[Callable[[], object]]:
    """What to call after each batch; a bar only if it is to `show`."""
    if show and find_spec("tqdm"):
        from tqdm import tqdm

        with tqdm(total=total, desc=description, unit="batch") as bar:
            yield bar.update
    else:
        yield lambda: None
