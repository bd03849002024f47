"""What `--require` refuses before any test runs."""

import sys

import pytest

from tests.helpers import require


@pytest.mark.parametrize("module", require.DEV)
def test_what_tests_would_skip_for_is_missed(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(pytest.UsageError, match=f"--require dev: .*{module}.* cannot be imported"):
        require.set_required(["dev"])


def test_unknown_names_are_refused() -> None:
    with pytest.raises(pytest.UsageError, match=r"--require knows torch, .*: got 'tensorflow'"):
        require.set_required(["torch", "tensorflow"])
