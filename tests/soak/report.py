"""docs/soak.md, from the results of the runs."""

import os
import platform
import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.tables import markdown
from tests.soak.deeds import Row
from tests.soak.held import COLUMNS, MEMORY


def cells(transport: str, ranks: int, row: Row) -> list[str]:
    """A deed's line of the table."""
    held = [
        f"{b:.1f} → {a:.1f}" if name == "MB" else f"{b:.0f} → {a:.0f}"
        for name, b, a in zip(COLUMNS, row.before, row.after, strict=True)
    ]
    return [*map(str, (transport, ranks, row.deed, row.turns)), *held]


def page(runs: Mapping[tuple[str, int], Any], figures: Mapping[str, Any], seconds: float) -> str:
    """The whole page; `runs` by transport and number of ranks."""
    deeds = [cells(*key, row) for key, results in runs.items() for row in results["rows"]]
    parts = [
        _HEAD,
        markdown(["transport", "ranks", "deed", "turns", *COLUMNS], deeds),
        _WIDTHS,
        markdown(_WIDTHS_HEAD, _widths(runs)),
        _more_ranks(runs),
    ]
    if figures:
        stages = [
            [stage, f"{last:.1f}", "" if mean is None else f"{mean:.2f}"]
            for stage, (last, mean) in figures.items()
        ]
        parts += [
            _STARTS,
            markdown(["stage", "s until the last rank", "processor s of a rank"], stages),
        ]
    parts += [_WORKERS, f"Python {platform.python_version()}, {seconds:.0f} s in all."]
    return "\n\n".join(parts) + "\n"


def _widths(runs: Mapping[tuple[str, int], Any]) -> Iterable[list[str]]:
    for (transport, ranks), results in runs.items():
        if "widths" not in results:
            continue
        held = results["widths"]
        columns = [[held[when][i] for when in ("alone", "1", "40", "200")] for i in range(3)]
        descriptors, threads, duplicates = columns
        cells = (transport, ranks, *descriptors)
        yield [*map(str, cells), *(f"{c[0]} / {c[-1]}" for c in (threads, duplicates))]


def _more_ranks(runs: Mapping[tuple[str, int], Any]) -> str:
    """What the formula says, once it is known to be right for the runs."""
    added = {
        ranks: results["widths"]
        for (transport, ranks), results in runs.items()
        if transport == "gloo" and "widths" in results
    }
    for ranks, held in added.items():
        got = held["200"][0] - held["alone"][0]
        expected = ranks - 1
        if got > expected:
            raise AssertionError(f"{ranks} ranks: {got} descriptors instead of {expected}")
    return textwrap.fill(_MORE_RANKS, 100)


_HEAD = f"""# What a long run holds

Nothing grows: no deed leaves descriptors, threads, groups, store keys, communicators or memory
behind, on 2 to 32 ranks.

`make soak` writes this page. Each line is one deed, done again and again on all ranks, with the
most that a rank held after the first half of the turns and at the end. The run fails if any rank
holds more descriptors, threads, groups with lines, store keys of multibn's or MPI communicators
at the end, or {MEMORY:g} MB more memory. `tests/soak/checks_soak.py` plants a leak of each
kind, and sees that each of them is found.

The ranks of *gloo* run with `MULTIBN_SHARED_MEMORY=0`, as ranks of several machines do. MB are a
rank's own memory and shared memory, without the files that are mapped. The 2 ranks run with at most
128 descriptors. The deeds: `steps` trains one network; `models` builds, converts, trains and drops
one; `widths` runs 200 layers of 200 widths; `groups` makes, uses and destroys a group; `saves`
saves, loads and pickles a model; `forks` trains in a forked child, and `spawns` in two spawned
children that share statistics; `inits` destroys the default process group and makes it anew."""

_WIDTHS = """## Descriptors, by ranks and widths

Descriptors of a rank, of the rank that has most: of torch.distributed (gloo) or MPI alone, after
200 sums of 200 lengths, and with layers of 1, 40 and 200 different numbers of channels. Threads and
MPI communicators: alone / with 200 widths."""

_WIDTHS_HEAD = ["transport", "ranks", "alone", "1", "40", "200", "threads", "MPI communicators"]

_MORE_RANKS = """Layers add no descriptors by their widths. Over gloo, multibn's group has one
connection with every other rank that it talks with, as torch's own group has, whatever the number
of widths. Of several machines, the first rank of each talks: 64 machines are 63 connections. Within
a machine, multibn adds one descriptor, the shared memory, for any number of ranks, and arrays above
64 kB open the group of all ranks. One thread asks the store, one waits for gloo. Over MPI, it adds
at most one duplicate of the communicator for each doubling of the width, and two more."""

_STARTS = f"""## 32 ranks over MPI on {len(os.sched_getaffinity(0))} cores

Where the time goes for 32 ranks with one thread each. The imports take most of the time: they are
processor time, and come before multibn or MPI does anything. Ranks that wait leave their core to
others after 0.2 ms where ranks outnumber the cores."""

_WORKERS = """## Workers of a DataLoader that run a layer with two threads

A layer runs with two threads in the parent, and then in forked workers that call
`torch.set_num_threads(2)`. Plain `torch.nn.BatchNorm2d` hangs, in training and in evaluation: no
batch came within 15 s. Its threads are those of GNU OpenMP, which a fork does not have. A layer of
multibn does not hang in training, where the loops are multibn's own; it hangs in evaluation, where
it calls torch's function. One thread, which is what torch gives to workers, is right for both; so
are workers that are started by spawn."""
