"""A short part of `make soak`: nothing that a rank holds grows."""

import pytest

from multibn.communicators import Communicator
from tests.soak.deeds import forks, groups, hold, models, saves, steps, widths


def check_nothing_grows(world: Communicator) -> None:
    if world.size != 2:
        return
    growths = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.soak.deeds._WIDTHS", range(3, 323, 8))
        # The program that `forks` starts would take most of the time.
        patch.setattr("tests.soak.deeds.subprocess.run", lambda *_, **__: None)
        for deed in (steps, models, widths, groups, saves, forks):
            row = hold(deed, world, 0.1)
            growths.append(row.after.growth(row.before))
    assert not any(growths), growths
