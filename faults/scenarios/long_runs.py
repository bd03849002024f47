"""A long run, which no rank may leave with more than it needs."""

import gc
import os
import re
from pathlib import Path

from faults.scenarios._scenario import scenario
from faults.trial import Trial

MODELS = 60
MEGABYTES = 2.0  # by which a rank may grow: each of Python's tables doubles once


def held() -> dict[str, float]:
    """Memory of this process, its own and shared, in MB; its descriptors and its threads."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    kilobytes = map(int, re.findall(r"Rss(?:Anon|Shmem):\s+(\d+) kB", status))
    counts = {name: len(os.listdir(f"/proc/self/{name}")) for name in ("fd", "task")}
    return {"memory": sum(kilobytes) / 1e3, **counts}


def growth(before: dict[str, float]) -> str:
    """What this process holds more of than before, or ""."""
    allowed = {"memory": MEGABYTES, "fd": 0, "task": 0}
    return ", ".join(
        f"{name} {before[name]:.4g} -> {now:.4g}"
        for name, now in held().items()
        if now > before[name] + allowed[name]
    )


@scenario(
    f"{MODELS} models, each built, trained and dropped: memory, descriptors and threads stay",
    seconds=5.0,
)
def many_models(trial: Trial) -> None:
    for number in range(MODELS):
        if number == MODELS // 2:
            before = held()
        trial.build()
        trial.steps(3)
    trial.mark()
    if grown := growth(before):
        raise AssertionError(f"a rank holds more than {MODELS // 2} models ago: {grown}")
