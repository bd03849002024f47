"""One rank: runs the checks of a module and writes down what became of them.

python tests/distributed/worker.py LAUNCHER MODULE DIRECTORY
"""

import importlib
import json
import sys
import time
import traceback
import warnings
from pathlib import Path
from types import ModuleType

from multibn.communicators import Communicator


def join_world(launcher: str) -> Communicator:
    if launcher == "torchrun":
        import torch.distributed as dist

        from multibn.communicators.torch_distributed import TorchDistributed

        dist.init_process_group("gloo")
        return TorchDistributed()
    from multibn.communicators.mpi import MPI

    return MPI()


def leave_world(launcher: str) -> None:
    if launcher == "torchrun":
        import torch.distributed as dist

        dist.destroy_process_group()
        # gloo's thread lets go of its last tensor a little later, and a process that is finalizing
        # by then is aborted ("terminate called without an active exception").
        time.sleep(0.5)


def run_checks(module: ModuleType, world: Communicator) -> dict[str, str]:
    said = {}
    for name, check in list(vars(module).items()):
        if not name.startswith("check_"):
            continue
        try:
            check(world)
            said[name] = ""
        except AssertionError:
            # Checks assert when their collectives are done, so the ranks are still in step.
            said[name] = traceback.format_exc()
    return said


def main(launcher: str, module: str, directory: str) -> None:
    warnings.simplefilter("error")
    world = join_world(launcher)
    said = run_checks(importlib.import_module(f"tests.distributed.{module}"), world)
    Path(directory, f"{world.rank:03}.json").write_text(json.dumps(said))
    leave_world(launcher)


if __name__ == "__main__":
    main(*sys.argv[1:])
