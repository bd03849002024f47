"""One rank of the parity command: `python -m multibn.parity.worker JOB DIRECTORY`.

JOB is a `Job` as JSON. The rank trains every surface over every communicator of its launcher, and
writes arrays and messages to DIRECTORY. It compares nothing, so that it cannot fail and
leave the other ranks waiting in a collective.
"""

import json
import sys
from typing import Any

import numpy as np

from multibn._launch import enter_world, leave_world, write
from multibn.communicators import Communicator
from multibn.parity.cases import CASES, Case
from multibn.parity.counting import CountingCommunicator
from multibn.parity.job import Job
from multibn.parity.oracle import Array
from multibn.parity.surfaces import SURFACES


def train(
    surface: str, case: Case, communicator: Communicator
) -> tuple[dict[str, Array], list[list[int]]]:
    """This rank's arrays by "step/quantity", and the lengths of the messages of every step.

    Collective over `communicator`. The gradients of weight and bias are means over the ranks. The
    last messages are those of the evaluation.
    """
    counting = CountingCommunicator(communicator)
    layer = SURFACES[surface](case, counting)
    arrays: dict[str, Array] = {}
    messages = []
    rank, size = communicator.rank, communicator.size
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        arguments = {} if case.padding is None else {"mask": masks[rank]}
        trained = layer.train(xs[rank], dys[rank], **arguments)
        messages.append(counting.take())
        # Optimizers average so. torch's gradients are each rank's sums; Chainer's are means.
        dweight, dbias = (
            np.asarray(communicator.allreduce(a.astype(np.float64))) / size
            for a in (trained.dweight, trained.dbias)
        )
        trained = trained._replace(dweight=dweight, dbias=dbias)
        arrays |= {f"{step}/{name}": a for name, a in trained._asdict().items()}
    arrays[f"{step}/eval"] = layer.evaluate(xs[rank], **arguments)
    messages.append(counting.take())
    if size == 1:  # without lines, a layer alone hands its numbers over, and sends nothing
        messages = [[] for _ in messages]
    return arrays, messages


def main(spec: str, directory: str) -> None:
    """Run the job `spec` and write this rank's results to `directory`."""
    job = Job(**json.loads(spec))
    arrays: dict[str, Array] = {}
    notes: dict[str, Any] = {}
    for name in job.communicators:
        communicator = enter_world(name)
        if job.model:
            from multibn.parity import model

            arrays, notes = model.train(job.model, communicator)
        for surface in job.surfaces:
            for case in (case for case in CASES if case.name in job.cases):
                key = f"{surface}/{name}/{case.name}"
                trained, notes[key] = train(surface, case, communicator)
                arrays |= {f"{key}/{k}": a for k, a in trained.items()}
    write(directory, communicator.rank, arrays, notes)
    leave_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
