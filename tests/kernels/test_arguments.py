"""A field of the passes' arguments reaches every verb, or the verb leaves the pass to `generic`."""

import inspect
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.helpers import require

require.need("core")

from multibn.engine import step  # noqa: E402
from multibn.kernels import BatchStatistics, Gradient, Input, Running, generic, host  # noqa: E402
from multibn.kernels.core import _core  # noqa: E402

RECORDS: list[Any] = [Input, Gradient, BatchStatistics, Running]
AXIS = (0, 2)


@pytest.mark.parametrize("record", RECORDS)
def test_the_reference_reads_each_field(record: Any) -> None:
    source = "".join(map(inspect.getsource, (generic, step)))
    for name in record._fields:
        assert f".{name}" in source, (
            f"`{record.__name__}.{name}` reaches no verb: generic.py must "
            "read the field by name. Other kernels leave a pass to them where the field is set."
        )


def with_one_more(record: Any) -> Any:
    fields, defaults = record._fields, record._field_defaults
    return namedtuple(record.__name__, [*fields, "more"], defaults=[*defaults.values(), None])


@pytest.fixture
def restored() -> Iterator[None]:
    yield
    host.use_fields(*RECORDS)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("record", [Input, Gradient, Running])
@pytest.mark.parametrize("more", [None, 1.0])
def test_a_field_that_the_core_does_not_know_goes_to_generic(
    record: Any, more: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 4, 3, 5))
    running = Running(np.zeros(3), np.ones(3), 0.1)
    i = Input(x, np.ones(3), np.ones(3), 1e-5, AXIS)
    message = host.begin_forward(i, 20.0, 20.0)
    _, batch, _ = host.finish_forward(i, message, 20.0, 20.0)

    new = with_one_more(record)
    host.use_fields(*[new if each is record else each for each in RECORDS])

    def extended(value: Any) -> Any:
        return new(*value, more=more) if type(value) is record else value

    running = extended(running)
    i = extended(i._replace(running=running))
    g = extended(Gradient(dy, i, batch))
    calls: dict[str, tuple[Any, ...]] = {
        "begin_forward": (i, 20.0, 20.0),
        "finish_forward": (i, message, 20.0, 20.0),
        "normalize": (i._replace(running=None), batch),
        "begin_backward": (g,),
        "finish_backward": (g, message[:6]),
    }
    used: list[str] = []

    def note(name: str) -> Any:
        def verb(*_: Any, **__: Any) -> Any:
            used.append(name)
            return 0, 0, 0

        return verb

    for name in (*calls, "move"):
        monkeypatch.setattr(generic, name, note(name))
    monkeypatch.setattr(host, "move", generic.move)
    for name, arguments in calls.items():
        getattr(host, name)(*arguments)
    reached = {
        Input: list(calls),
        Gradient: ["begin_backward", "finish_backward"],
        Running: ["move"],
    }[record]
    assert used == (reached if more else []), "a set field must not be forgotten in silence"


def test_a_field_that_the_core_misses_is_named() -> None:
    less: Any = namedtuple("Input", ["x", "weight"])  # type: ignore[name-match]
    with pytest.raises(TypeError, match=r"Input must have the fields \['axis', .*: got none"):
        host.use_fields(less, *RECORDS[1:])


def test_the_core_says_which_arguments_were_wrong() -> None:
    with pytest.raises(TypeError, match="expected 4 arguments, got 1"):
        _core.begin_forward(1)
    with pytest.raises(TypeError, match=r"expected .*Input.*, got .*int"):
        _core.begin_forward(1, None, 1.0, 1.0)


@pytest.mark.parametrize("kernels", [host, generic])
def test_what_is_needed_and_missing_is_an_error_in_python(kernels: Any) -> None:
    x = np.ones((6, 2))
    i = Input(x, None, None, 1e-5, (0,))
    batch = BatchStatistics(np.zeros(2), np.ones(2), np.array(6.0), np.array(1 / 6))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
        kernels.begin_backward(Gradient(None, i, batch))
    with pytest.raises(TypeError, match="NoneType"):
        kernels.normalize(i._replace(eps=None), batch)  # type: ignore[arg-type]


def test_a_momentum_below_0_is_that_of_the_formula() -> None:
    moved = []
    for kernels in (host, generic):
        running: Any = Running(np.zeros(2), np.ones(2), -0.5, "biased", np.array(0))
        i = Input(np.arange(12.0).reshape(6, 2), None, None, 1e-5, (0,), running=running)
        kernels.finish_forward(i, kernels.begin_forward(i, 6.0, 6.0), 6.0, 6.0)
        moved.append([*running.mean, *running.var, int(running.num_batches)])
    assert moved[0] == moved[1]
    assert moved[0][0] == -2.5


class Derived(np.ndarray):
    """As NumPy's own classes, np.memmap for example."""


def test_arrays_of_a_derived_class_have_the_same_numbers() -> None:
    i = Input(np.arange(12.0).reshape(6, 2), None, None, 1e-5, (0,))
    derived = i._replace(x=i.x.view(Derived))
    np.testing.assert_array_equal(
        host.begin_forward(derived, 6.0, 6.0), host.begin_forward(i, 6.0, 6.0)
    )
