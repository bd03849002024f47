"""A rank: does what `__main__.py` asks for, and writes the rows.

python -m tests.programs.worker DIRECTORY NAME...
"""

import contextlib
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from multibn._launch import enter_world, leave_world
from tests.programs import operators
from tests.programs.row import Row


def parts() -> Mapping[str, Callable[[], Row]]:
    """Everything that is tried, by name: each gives a row, and may be collective."""
    operators.declare()  # before torchvision is imported
    from tests.programs import classes, conversion, models, tools, trainers, training

    return {
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


def main(directory: str, names: Sequence[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's; multibn's own are errors
        warnings.filterwarnings("error", module="multibn")
        world = enter_world("gloo")
        every = parts()
        for number, name in enumerate(every):
            path = Path(directory, f"{number:03}.json")
            failed = path.with_suffix(".failed")
            if path.exists() or failed.exists() or not any(part in name for part in names):
                continue
            start = time.monotonic()
            try:
                row = every[name]()
            except BaseException as error:
                traceback.print_exc()
                text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                program, _, tried = name.partition(" ")
                with contextlib.suppress(FileExistsError), failed.open("x") as file:
                    json.dump(asdict(Row(program, tried, complaint=text)), file)
                os._exit(1)  # the launcher ends the other ranks, which wait for this one
            if world.rank == 0:
                path.write_text(json.dumps(asdict(row)))
                print(f"{time.monotonic() - start:5.1f} s  {name}: {row}", flush=True)
        leave_world()


if __name__ == "__main__":
    # ultralytics writes its settings there, and asks the network for news otherwise.
    os.environ["YOLO_OFFLINE"] = "True"
    with tempfile.TemporaryDirectory() as settings:
        os.environ["YOLO_CONFIG_DIR"] = settings
        main(sys.argv[1], sys.argv[2:])
