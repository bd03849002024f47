"""One rank: trains every surface over every communicator of its launcher, and writes it down.

python -m multibn.parity.worker SPEC DIRECTORY, where SPEC is the JSON of `launch.Job.spec`. Writes
`NNN.npz`, the arrays, and `NNN.json`, messages and times. Nothing is compared here, so that no rank
leaves the others waiting in a collective.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from multibn.communicators import Communicator, SingleProcess
from multibn.parity.cases import CASES, Case, NDArrayAny
from multibn.parity.peers import PEERS
from multibn.parity.surfaces import SURFACES


class CountingCommunicator:
    """Notes the size of every message of another communicator."""

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.messages: list[int] = []

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def allreduce(self, x: Any, /) -> Any:
        self.messages.append(int(np.prod(x.shape)))
        return self.inner.allreduce(x)

    def split(self, color: int, key: int = 0) -> Communicator:
        return self.inner.split(color, key)

    def take(self) -> list[int]:
        """The sizes noted since the last call."""
        taken, self.messages = self.messages, []
        return taken


def join(communicator: str) -> Communicator:
    """The communicator of this name over all ranks."""
    if communicator == "gloo":
        import torch.distributed as dist

        from multibn.communicators.torch_distributed import TorchDistributed

        if not dist.is_initialized():
            dist.init_process_group("gloo")
        return TorchDistributed()
    if communicator == "mpi":
        from multibn.communicators.mpi import MPI

        return MPI()
    if communicator == "chainermn naive":
        from multibn.chainer_backend import compat
        from multibn.communicators.chainermn import ChainerMN

        compat.make_importable()
        import chainermn

        return ChainerMN(chainermn.create_communicator("naive"))
    return SingleProcess()


def leave() -> None:
    """End torch's process group, if there is one."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_initialized():
        distributed.destroy_process_group()
        # gloo's thread lets go of its last tensor a little later, and a process that is finalizing
        # by then is aborted.
        time.sleep(0.5)


def train(
    surface: str, case: Case, communicator: Communicator
) -> tuple[dict[str, NDArrayAny], dict[str, Any]]:
    """Arrays by "step/quantity", and messages and seconds of every step, of this rank.

    Collective over `communicator`. The last entry of the messages is the evaluation's.
    """
    counting = CountingCommunicator(communicator)
    layer = (SURFACES | PEERS)[surface](case, counting)
    arrays: dict[str, NDArrayAny] = {}
    messages, seconds = [], []
    rank, size = communicator.rank, communicator.size
    for step in range(case.steps):
        xs, dys = case.batches(size, step)
        start = time.perf_counter()
        result = layer.train(xs[rank], dys[rank])
        seconds.append(time.perf_counter() - start)
        mean, var = layer.running()
        quantities = {**result._asdict(), "running_mean": mean, "running_var": var}
        arrays |= {f"{step}/{name}": np.array(a) for name, a in quantities.items()}
        messages.append(counting.messages)
        counting.messages = []
    arrays[f"{step}/eval"] = layer.evaluate(xs[rank])
    messages.append(counting.messages)
    return arrays, {"messages": messages, "seconds": seconds}


def main(spec: str, directory: str) -> None:
    """Run all that `spec` names and write the results to `directory`."""
    job = json.loads(spec)
    arrays: dict[str, NDArrayAny] = {}
    notes: dict[str, Any] = {}
    for name in job["communicators"]:
        communicator = join(name)
        if job["model"]:
            from multibn.parity import model

            arrays, notes = model.train(job["model"], communicator)
        for surface in job["surfaces"]:
            for case in CASES:
                if case.name not in job["cases"]:
                    continue
                key = f"{surface}/{name}/{case.name}"
                results, notes[key] = train(surface, case, communicator)
                arrays |= {f"{key}/{k}": a for k, a in results.items()}
    out = Path(directory, f"{communicator.rank:03}")
    np.savez(out.with_suffix(".npz"), **arrays)  # type: ignore[arg-type]
    out.with_suffix(".json").write_text(json.dumps(notes))
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
