"""Every layer runs compiled in a process in which nothing has run before.

An eager step fills caches. Code that is traced while such a cache is filled fails, or is compiled
again, in a fresh process only: each way runs in a fork of a process that has imported torch.
"""

import copy
import os
import sys
import traceback
import warnings
from functools import partial
from typing import Any

import torch

from multibn import SingleProcess, torch_backend
from tests.engine.test_every_option import DEFAULTS, DYS, LAYERS, XS, Function, _step
from tests.helpers import launch

NEEDS = "torch chainer"

# Of all layers, those with code of their own.
NAMES = [name for name in LAYERS if name not in ("naive", "converted")]
WAYS = [*((name, "") for name in NAMES), ("split", "step statistics"), ("layer", "masked")]


def _steps(run: Any, layer: Any, step: str) -> list[Any]:
    """Two training steps and an evaluation. The second step must find the code of the first."""
    results = []
    is_whole = not isinstance(layer, Function)  # of whose code parts are compiled
    for n, (xs, dys) in enumerate(zip(XS, DYS, strict=True)):
        x, dy = torch.tensor(xs[0]), torch.tensor(dys[0])
        with torch._dynamo.config.patch(error_on_recompile=n > 0 and is_whole):
            if step == "step statistics":
                with torch_backend.step_statistics(layer):
                    results += _step(run, layer, x, dy)
            else:
                options = {"lengths": torch.full((4,), 5)} if step == "masked" else {}
                results += _step(partial(run, **options), layer, x, dy)
    layer.eval()
    return [*results, run(torch.tensor(XS[0][0])), *layer.state_dict().values()]


def _run(name: str, step: str) -> None:
    warnings.simplefilter("ignore")  # Dynamo's
    layer = LAYERS[name](SingleProcess(), DEFAULTS)
    twin = copy.deepcopy(layer)
    found = _steps(torch.compile(layer, backend="aot_eager"), layer, step)
    torch.testing.assert_close(found, _steps(twin, twin, step), rtol=1e-9, atol=1e-9)


def test_compiled_code_needs_no_step_before_it() -> None:
    run = launch.printed(
        "-m", "tests.torch_backend.test_compiled_first", interpreter=launch.python()
    )
    assert run.split("\n")[:-1] == [f"{way} right" for way in WAYS], run


if __name__ == "__main__":
    for way in WAYS:
        if os.fork() == 0:
            try:
                _run(*way)
                print(way, "right", flush=True)
            except BaseException:
                traceback.print_exc(file=sys.stdout)
                sys.stdout.flush()
            os._exit(0)
        os.wait()
