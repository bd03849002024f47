"""Which activations a GPU's kernels take as they lie in memory."""

import pytest

from multibn.kernels.layout import sizes_in_memory


@pytest.mark.parametrize(
    "shape, strides, axis, sizes",
    [
        pytest.param((2, 3, 4, 5), (60, 20, 5, 1), (0, 2, 3), (2, 3, 20), id="contiguous"),
        pytest.param((2, 3, 4, 5), (60, 1, 15, 3), (0, 2, 3), (40, 3, 1), id="channels last"),
        pytest.param((2, 3, 4, 5), (60, 20, 1, 4), (0, 2, 3), (2, 3, 20), id="columns first"),
        pytest.param((4, 3, 5), (15, 5, 1), (0,), (4, 15, 1), id="two channel axes"),
        pytest.param((4, 3, 5), (15, 1, 3), (0,), None, id="channel axes not in order"),
        pytest.param((3, 4, 5), (20, 5, 1), (1,), None, id="a reduced axis between channels"),
        pytest.param((4, 3, 5), (30, 10, 2), (0, 2), None, id="gaps"),
        pytest.param((1, 3, 1), (7, 1, 9), (0, 2), (1, 3, 1), id="axes of one element"),
    ],
)
def test_an_activation_has_three_sizes_in_memory_or_is_copied(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    axis: tuple[int, ...],
    sizes: tuple[int, int, int] | None,
) -> None:
    assert sizes_in_memory(shape, strides, axis) == sizes
