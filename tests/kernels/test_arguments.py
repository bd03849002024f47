"""A field of the passes' arguments reaches every verb, or the verb leaves the pass to `generic`."""

import inspect
from typing import Any

import numpy as np
import pytest

from tests.helpers import require

require.need("core")

from multibn.engine import step  # noqa: E402
from multibn.kernels import BatchStatistics, Gradient, Input, Running, generic, host  # noqa: E402
from multibn.kernels.arguments import VERBS, deferring  # noqa: E402
from multibn.kernels.core import _core  # noqa: E402

RECORDS: list[Any] = [Input, Gradient, BatchStatistics, Running]


@pytest.mark.parametrize("record", RECORDS)
def test_the_reference_reads_each_field(record: Any) -> None:
    source = "".join(map(inspect.getsource, (generic, step)))
    for name in record._fields:
        assert f".{name}" in source, (
            f"`{record.__name__}.{name}` reaches no verb: generic.py must "
            "read the field by name. Other kernels leave a pass to them where the field is set."
        )


@pytest.mark.parametrize("missing", ["residual", "y", "num_batches"])
@pytest.mark.parametrize("is_set", [False, True])
def test_a_field_that_a_file_does_not_know_goes_to_generic(
    missing: str, is_set: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {k: [n for n in names if n != missing] for k, names in host.FIELDS.items()}
    monkeypatch.setattr(host, "FIELDS", known)
    used: dict[str, list[Any]] = {name: [] for name in VERBS}
    for name in VERBS:
        for file in (host, generic):
            note = lambda *_, at=used[name], file=file, **__: at.append(file)  # noqa: E731
            monkeypatch.setattr(file, name, note)
    verbs, value = deferring(host, generic), np.ones(1) if is_set else None

    def record(kind: Any, *values: Any, **options: Any) -> Any:
        return kind(*values, **options | ({missing: value} if missing in kind._fields else {}))

    running = record(Running, np.zeros(3), np.ones(3), 0.1)
    i = record(Input, np.ones((2, 3)), None, None, 1e-5, (0,), running=running)
    g = record(Gradient, i.x, i, BatchStatistics(*np.ones(4)))
    verbs.begin_forward(i, 2.0, 2.0, out=None)
    verbs.finish_forward(i, np.ones(8), 2.0, 2.0)
    verbs.normalize(i, g.batch)
    verbs.begin_backward(g)
    verbs.finish_backward(g, np.ones(6))
    of_input = generic if is_set and missing != "y" else host
    of_gradient = generic if is_set else host
    assert {name: [of_gradient if "back" in name else of_input] for name in VERBS} == used, (
        "a set field must not be forgotten in silence"
    )


def test_files_that_know_all_fields_are_called_themselves() -> None:
    assert deferring(host, generic) is host


def test_the_core_says_which_arguments_were_wrong() -> None:
    with pytest.raises(TypeError, match="expected 5 arguments, got 1"):
        _core.begin_forward(1)


@pytest.mark.parametrize("kernels", [host, generic])
def test_what_is_needed_and_missing_is_an_error_in_python(kernels: Any) -> None:
    x = np.ones((6, 2))
    i = Input(x, None, None, 1e-5, (0,))
    batch = BatchStatistics(np.zeros(2), np.ones(2), np.array(6.0), np.array(1 / 6))
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute"):
        kernels.begin_backward(Gradient(None, i, batch))
    with pytest.raises(TypeError, match="NoneType"):
        kernels.normalize(i._replace(eps=None), batch)  # type: ignore[arg-type]
