"""What of NCCL's communicator can be told without a GPU."""

import importlib.util
import pickle
from typing import Any

import numpy as np
import pytest

from multibn import SingleProcess, as_communicator
from multibn.communicators import nccl
from multibn.communicators.nccl import NCCL

needs_no_cupy = pytest.mark.skipif(
    importlib.util.find_spec("cupy") is not None, reason="CuPy is installed"
)


def loaded() -> Any:
    """A handle as it comes out of a file: made without CuPy."""
    function, arguments = nccl._restore, (SingleProcess(),)
    return function(*arguments)


@needs_no_cupy
def test_without_cupy_it_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r"NCCL needs CuPy: not found.*pip install 'multibn\[cup"):
        NCCL(SingleProcess())
    handle = loaded()
    with pytest.raises(ImportError, match="NCCL needs CuPy"):
        handle.comm  # noqa: B018


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"`unique_id` must be of 128 numbers: got \(1, 2"):
        NCCL(SingleProcess(), unique_id=(1, 2, 3))
    with pytest.raises(TypeError, match="a communicator must be None"):
        NCCL("gloo")


def test_handles_can_be_loaded_without_cupy() -> None:
    handle = loaded()
    assert as_communicator(handle) is handle
    found = pickle.loads(pickle.dumps(handle))
    assert isinstance(found, NCCL)
    assert (found.rank, found.size) == (0, 1)
    assert repr(found) == "NCCL(SingleProcess())"


def test_host_arrays_are_not_on_a_gpu() -> None:
    assert not nccl.is_on_gpu(np.ones(3))
