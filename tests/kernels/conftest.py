"""What several tests of the kernels ask for."""

import pytest

from multibn.kernels import generic
from tests.kernels.passes import refuse

VERBS = "begin_forward", "finish_forward", "begin_backward", "finish_backward", "normalize", "move"


@pytest.fixture
def compiled_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference raises."""
    for name in VERBS:
        monkeypatch.setattr(generic, name, refuse)
