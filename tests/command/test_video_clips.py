"""The films of examples/video.py, and which of their frames are trained on."""

import importlib
from typing import Any

import pytest

from tests.helpers import require
from tests.helpers.launch import ROOT

require.need("torch", "video")

import torch  # noqa: E402


@pytest.fixture
def films(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module("films")


def test_films_are_decoded(films: Any) -> None:
    shapes = [tuple(films.decode(film).shape) for film in films.FILMS]
    assert shapes == [(3, count, films.SIZE, films.SIZE) for count in (120, 250, 132)]
    film = films.decode("bigbuckbunny")
    assert -1 <= film.min() < -0.9
    assert 0.9 < film.max() <= 1
    assert (film[:, 1:] != film[:, :-1]).flatten(2).any(2).any(0).all()  # no frame stands still
    with pytest.raises(FileNotFoundError, match="has no film 'another'"):
        films.decode("another")


def test_no_frame_is_in_both_sets(films: Any) -> None:
    made = [torch.arange(t).view(1, t, 1, 1).expand(3, t, 2, 2) / 1 for t in (40, 100)]
    seen = {}
    for training in (True, False):
        clips = films.Clips(made, training=training)
        seen[training] = {(y, int(t)) for x, y in clips.clips for t in x.unique()}
        assert all(x.shape == (3, films.FRAMES, 2, 2) for x, _ in clips.clips)
    assert seen[True] == {(0, t) for t in range(30)} | {(1, t) for t in range(75)}
    assert seen[False] == {(0, t) for t in range(30, 40)} | {(1, t) for t in range(75, 100)}
