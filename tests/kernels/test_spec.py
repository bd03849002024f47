"""A field of the passes' arguments reaches every verb, or the file is left to `reference`."""

import contextlib
import inspect
import sys
from typing import Any

import numpy as np
import pytest

from multibn import _platform, kernels
from multibn._typing import Array
from multibn.engine import plan
from multibn.kernels import Gradient, NormArgs, Running, cpu, reference, steps
from multibn.kernels.core import _core
from multibn.kernels.spec import NOT_FINITE, BatchStatistics, PackedStatistics, options_of

NEEDS = "core"


@pytest.mark.parametrize("record", [Gradient, BatchStatistics, Running])  # NormArgs: test_passes.py
def test_the_reference_reads_each_field(record: Any) -> None:
    source = "".join(map(inspect.getsource, (reference, steps, plan)))
    for name in record._fields:
        assert f".{name}" in source, (
            f"`{record.__name__}.{name}` reaches no verb: reference.py or steps.py must "
            "read the field by name. Other kernels are not used until they know the field."
        )


@pytest.mark.parametrize("record", [NormArgs, Gradient, BatchStatistics, Running])
def test_the_docstring_describes_each_field(record: Any) -> None:
    lines = inspect.cleandoc(record.__doc__).splitlines()
    headings = [name for line in lines if line[:1] != " " for name in line.split(", ")]
    missing = [name for name in record._fields if name not in headings]
    assert not missing, f"the docstring of `{record.__name__}` must describe {missing}"


def test_all_fields_that_are_no_arrays_are_options() -> None:
    """Whoever makes the arguments anew for a backward pass takes these together."""
    kinds = list(NormArgs.__annotations__.values())
    places = [k for k, kind in enumerate(kinds) if kind not in (Array, Array | None)]
    args: Any = range(len(kinds))
    names = [NormArgs._fields[k] for k in places]
    assert [*options_of(NormArgs(*args))] == places, f"`OPTIONS` of spec.py must be {names}"
    assert places == [*range(3, 3 + len(places))], f"{names} must follow `NormArgs.bias`"


@pytest.mark.parametrize("missing", ["", "residual", "y", "num_batches"])
def test_a_file_that_does_not_know_a_field_is_left_to_generic(
    missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {k: [n for n in names if n != missing] for k, names in cpu.FIELDS.items()}
    monkeypatch.setattr(cpu, "FIELDS", known)
    monkeypatch.delenv("MULTIBN_KERNELS", raising=False)
    chosen = kernels._native.__wrapped__("cpu")
    unknown = [name for kind, names in known.items() for name in {*kind._fields} - {*names}]
    assert chosen is (reference if missing else cpu), f"the C core does not know {unknown}"


@pytest.mark.parametrize("asked", ["", "reference"])
def test_a_missing_core_is_told_unless_the_slow_way_was_asked_for(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "multibn.kernels.core._core", None)
    monkeypatch.delattr("multibn.kernels.core._core")
    monkeypatch.delitem(sys.modules, "multibn.kernels.cpu")
    monkeypatch.setenv("MULTIBN_KERNELS", asked)
    monkeypatch.setattr(_platform.metadata, "distributions", lambda **_: [])  # no other one
    message = r"the C core is missing \(.*_core.*\), so .* slower\. Install a C compiler"
    with contextlib.nullcontext() if asked else pytest.warns(RuntimeWarning, match=message):
        assert kernels._native.__wrapped__("cpu") is reference


def test_the_core_says_which_arguments_were_wrong() -> None:
    with pytest.raises(TypeError, match="expected 5 arguments, got 1"):
        _core.begin_forward(1)


@pytest.mark.parametrize("file", [cpu, reference])
def test_what_is_needed_and_missing_is_an_error_in_python(file: Any) -> None:
    x = np.ones((6, 2))
    i = NormArgs(x, None, None, 1e-5, (0,))
    batch = PackedStatistics(np.array([0, 0, 1, 1, 6, 1 / 6]), (2,))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
        file.begin_backward(Gradient(None, i, batch))
    with pytest.raises(TypeError, match="NoneType"):
        file.normalize(i._replace(eps=None), batch)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [np.inf, 1e30])
def test_an_overflow_is_no_warning_of_numpys(value: float) -> None:
    """Which one rank alone would have, as an error perhaps, before its message."""
    x = np.full((6, 2), value, "f")
    x[0] = -value
    args = NormArgs(x, np.ones(2, "f"), None, 1e-5, (0,))
    with np.errstate(all="raise"):
        payload = reference.begin_forward(args, 6.0, 6.0)
        _, batch, state = reference.finish_forward(args, payload, 6.0, 6.0)
        g = Gradient(x, args, batch)
        summed, *_ = reference.begin_backward(g)
        reference.finish_backward(g, summed)
    assert state == NOT_FINITE
