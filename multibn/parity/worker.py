"""One rank of the parity command: `python -m multibn.parity.worker JOB DIRECTORY`.

JOB is JSON with the arguments of `command.launch`. The rank trains every surface over every
communicator of its launcher, and writes arrays to DIRECTORY. It compares nothing, so that it cannot
fail and leave the other ranks waiting in a collective.
"""

import json
import sys
from typing import Any

import numpy as np

from multibn._launch import enter_world, leave_world, write
from multibn.communicators import Communicator
from multibn.parity.cases import CASES, Case
from multibn.parity.oracle import Array
from multibn.parity.surfaces import SURFACES


def train(surface: str, case: Case, communicator: Communicator) -> dict[str, Array]:
    """This rank's arrays by "step/quantity".

    Collective over `communicator`. The gradients of weight and bias are means over the ranks.
    """
    layer = SURFACES[surface](case, communicator)
    arrays: dict[str, Array] = {}
    rank, size = communicator.rank, communicator.size
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        arguments = {} if case.padding is None else {"mask": masks[rank]}
        trained = layer.train(xs[rank], dys[rank], **arguments)
        # Optimizers average so. torch's gradients are each rank's sums; Chainer's are means.
        for name in ("dweight", "dbias"):
            total = communicator.allreduce(trained[name].astype(np.float64))
            trained[name] = np.asarray(total) / size
        arrays |= {f"{step}/{name}": a for name, a in trained.items()}
    arrays[f"{step}/eval"] = layer.evaluate(xs[rank], **arguments)
    return arrays


def main(job: str, directory: str) -> None:
    """Run the job and write this rank's results to `directory`."""
    asked = json.loads(job)
    arrays: dict[str, Array] = {}
    notes: dict[str, Any] = {}
    for name in asked["communicators"]:
        communicator = enter_world(name)
        if asked["model"]:
            from multibn.parity import model

            arrays, notes = model.train(asked["model"], communicator)
        for surface in asked["surfaces"]:
            for case in (case for case in CASES if case.name in asked["cases"]):
                trained = train(surface, case, communicator)
                arrays |= {f"{surface}/{name}/{case.name}/{k}": a for k, a in trained.items()}
    write(directory, communicator.rank, arrays, notes)
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
