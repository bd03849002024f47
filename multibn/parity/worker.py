"""One rank of a launch of the parity command: `python -m multibn.parity.worker JOB DIRECTORY`.

JOB is a `Job` as JSON. The rank trains every surface over every communicator of its launcher, and
writes arrays, messages and times to DIRECTORY. It compares nothing, so that it cannot fail and
leave the other ranks waiting in a collective.
"""

import json
import sys
import time
from typing import Any

import numpy as np

from multibn._launch import enter_world, leave_world, write
from multibn.communicators import Communicator
from multibn.parity.cases import CASES, Case, NDArrayAny
from multibn.parity.counting import CountingCommunicator
from multibn.parity.job import Job
from multibn.parity.peers import PEERS
from multibn.parity.surfaces import SURFACES


def train(
    surface: str, case: Case, communicator: Communicator
) -> tuple[dict[str, NDArrayAny], dict[str, Any]]:
    """This rank's arrays by "step/quantity", and notes: messages and seconds of every step.

    Collective over `communicator`. The last entry of the messages is that of the evaluation.
    """
    counting = CountingCommunicator(communicator)
    make = PEERS[surface].make if surface in PEERS else SURFACES[surface]
    layer = make(case, counting)
    arrays: dict[str, NDArrayAny] = {}
    messages, seconds = [], []
    rank, size = communicator.rank, communicator.size
    for step in range(case.steps):
        xs, dys, masks = case.batches(size, step)
        tells = case.padding is not None and surface not in PEERS  # which know no masks
        arguments = {"mask": masks[rank]} if tells else {}
        start = time.perf_counter()
        result = layer.train(xs[rank], dys[rank], **arguments)
        seconds.append(time.perf_counter() - start)
        mean, var = layer.running()
        quantities = {**result._asdict(), "running_mean": mean, "running_var": var}
        arrays |= {f"{step}/{name}": np.array(a) for name, a in quantities.items()}
        messages.append(counting.take())
    arrays[f"{step}/eval"] = layer.evaluate(xs[rank], **arguments)
    messages.append(counting.take())
    if size == 1:  # without lines, a layer alone hands its numbers over, and sends nothing
        messages = [[] for _ in messages]
    return arrays, {"messages": messages, "seconds": seconds}


def main(spec: str, directory: str) -> None:
    """Run the job `spec` and write this rank's results to `directory`."""
    job = Job(**json.loads(spec))
    arrays: dict[str, NDArrayAny] = {}
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
