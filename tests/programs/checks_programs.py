"""Other people's models, trainers and rules with a converted model: `make programs`.

Each check is a row of the table in tests/programs/README.md, which the last check writes.
"""

import os
import re
import tempfile
import warnings
from collections.abc import Callable
from functools import partial

import torch

from multibn.communicators import Communicator
from tests.harness import checks
from tests.harness.runs import on, only
from tests.programs import operators
from tests.programs.row import Row, put_all

RUNS = on("torchrun", 2, needs="programs")

checks.DEADLINE = 600.0  # for all models of a library
# ultralytics writes its settings there, and asks the network for news otherwise.
os.environ |= {"YOLO_OFFLINE": "True", "YOLO_CONFIG_DIR": tempfile.gettempdir()}

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    operators.declare()  # before torchvision is imported
    from tests.programs import classes, conversion, models, tools, trainers, training

# By name; each part may be collective.
PARTS: dict[str, Callable[[], Row]] = {
    "timm every": conversion.every_file_of_timm,
    "torchvision every": conversion.every_model_of_torchvision,
    **{f"{m.program} {m.name}": partial(training.trained, m) for m in models.MODELS},
    "accelerate": trainers.accelerate,
    "lightning": trainers.lightning,
    "transformers Trainer": trainers.transformers,
    **{
        f"{rule[0]} {rule[1]}": partial(classes.found, *rule)
        for rule in (*classes.RULES, *tools.TOOLS)
    },
}

# What warnings of multibn's layers in training say; conversions may leave layers as they are.
_OF_LAYERS = (
    "has skipped a batch",
    "not synchronized, although",
    "not with ranks outside",
    "C core is",
)


def _check(name: str, world: Communicator) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's; multibn's own are errors
        for text in _OF_LAYERS:
            warnings.filterwarnings("error", f".*{text}")
        # Where a trace runs the layer, the layer asks about shapes.
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        row = PARTS[name]()
    if world.rank == 0:
        row.save([*PARTS].index(name))
    assert not row.complaint, row


for _name in PARTS:
    globals()["check_" + re.sub(r"\W+", "_", _name)] = partial(_check, _name)


@only(last=True)
def check_the_page_has_all_rows(world: Communicator) -> None:
    if world.rank == 0:
        assert put_all() == len(PARTS)
