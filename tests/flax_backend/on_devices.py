"""Processes with four devices, which run the functions check_* of the files devices_*.py.

python -m tests.flax_backend.on_devices FILES
"""

import ast
import importlib
import inspect
import itertools
import json
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.helpers import launch

NUM_DEVICES = 4
FLAGS = f"--xla_force_host_platform_device_count={NUM_DEVICES}"
FOLDER = Path(__file__).parent


def checks(files: Sequence[str]) -> list[str]:
    """The names of all checks in files, which are not imported."""
    return [
        f"{file}:{node.name}"
        for file in files
        for node in ast.parse(Path(FOLDER, f"{file}.py").read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
    ]


def run(*files: str) -> dict[str, str]:
    """The errors of all checks in files, by names; no text where a check has passed."""
    printed = launch.printed(
        "-m", "tests.flax_backend.on_devices", *files, XLA_FLAGS=FLAGS, JAX_PLATFORMS="cpu"
    )
    errors: dict[str, str] = json.loads(printed.splitlines()[-1])
    return errors


# Half of the files each: less than a minute of processor time.
_FILES = sorted(path.stem for path in FOLDER.glob("devices_*.py"))
RUNS = {half: partial(run, *half) for half in (tuple(_FILES[:2]), tuple(_FILES[2:]))}


def each(**values: list[object]) -> Iterator[dict[str, object]]:
    """The product of the values, as keywords."""
    for chosen in itertools.product(*values.values()):
        yield dict(zip(values, chosen, strict=True))


def main() -> None:
    from _pytest.assertion import install_importhook
    from _pytest.config import get_config

    install_importhook(get_config()).fnpats = ["devices_*.py"]  # which show both sides
    warnings.simplefilter("error")
    errors = {}
    for name in checks(sys.argv[1:]):
        module, _, function = name.partition(":")
        try:
            check = getattr(importlib.import_module(f"tests.flax_backend.{module}"), function)
            assert not inspect.signature(check).parameters
            check()
            errors[name] = ""
        except BaseException:
            errors[name] = traceback.format_exc()
    sys.stdout.flush()
    print(json.dumps(errors), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # without the waits of JAX's threads
