"""The parts of the benchmark: launches each part, and evaluates its times."""

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from benchmarks import layer, scaling, worker
from multibn.check.network import BLOCKS
from multibn.check.timing import PROCESSOR, WALL, Seconds, median_ms, slowest

Row = dict[str, Any]


Settings: TypeAlias = SimpleNamespace  # what is measured; a comparison takes about `seconds`
# The sizes, and those of seconds instead of minutes: tests that every part runs, whose numbers mean
# nothing.
_SIZES: dict[str, tuple[Any, Any]] = {
    "shapes": (layer.SHAPES, [(2, 3, 4, 4), (8, 4)]),
    "seconds": (5.5, 0.0),
    "blocks": (BLOCKS, (1,)),
    "images": ((8, 3, 112, 112), (2, 3, 16, 16)),
    "resnet_seconds": (45.0, 0.0),
    "message_channels": ((64, 256, 2048), (1, 8)),
    "message_seconds": (1.5, 0.0),
    "compiled_shape": ((8, 256, 28, 28), (2, 8, 4, 4)),
    "compiled_seconds": (15.0, 0.0),
    "observations": ((4096, 64), (8, 4)),
    "group_shape": ((8, 64, 28, 28), (2, 4, 4, 4)),
    "flax_shapes": ([(32, 28, 28, 64), (32, 7, 7, 512), (1024, 64)], [(4, 4)]),
    "reversible_size": (224, 32),
    "reversible_timed": ([("rev_vit_s", 8), ("rev_mvit_b", 2)], [("1 blocks", 2)]),
}
FULL, QUICK = (Settings(**{name: s[k] for name, s in _SIZES.items()}) for k in (0, 1))


def _times(
    function: str, over: str, size: int = 2, /, **options: Any
) -> tuple[dict[str, dict[str, Seconds]], Row]:
    """Times of the slowest rank, those of "label/name" as `[label][name]`, and notes of rank 0."""
    written = worker.run(f"benchmarks.{function}", over, size, **options)
    found: dict[str, dict[str, Seconds]] = {}
    for key, taken in slowest([arrays for arrays, _ in written]).items():
        label, _, name = key.rpartition("/")
        found.setdefault(label, {})[name] = taken
    return found, written[0][1]


def one_layer(function: str, over: str, settings: Settings, **options: Any) -> list[Row]:
    """A row for each shape and variant: a layout, or a split of the batch."""
    shapes = [shape for shape in settings.shapes if len(shape) == 4 or "relu" not in options]
    times, notes = _times(function, over, shapes=shapes, seconds=settings.seconds, **options)
    rows = []
    for label, taken in times.items():
        shape, variant = label.split("/")
        sizes = [int(n) for n in shape.split("x")]
        rows.append({
            "shape": sizes, "variant": variant, "megabytes": 4e-6 * prod(sizes), **notes,
            **_compared({name: (taken[layer.beside(name)], t) for name, t in taken.items()
                         if layer.beside(name) in taken}),
        })  # fmt: skip
    return rows


def network(settings: Settings) -> list[Row]:
    """Time a network; "waiting" are local batch norms that wait for the other rank, as ours do."""
    times, notes = _times("resnet.measure", "mpi", blocks=settings.blocks, batch=settings.images,
                          seconds=settings.resnet_seconds)  # fmt: skip
    return _beside_one("synchronized", times, notes)


def compiled(settings: Settings) -> list[Row]:
    """A residual block under torch.compile, beside the local block and beside both without."""
    times, notes = _times("compiled.measure", "mpi", shape=settings.compiled_shape,
                          seconds=settings.compiled_seconds)  # fmt: skip
    return _beside_one("compiled synchronized", times, notes)


def messages(settings: Settings) -> list[Row]:
    """A layer's message with all checks, and the bare allreduce of torch.distributed or MPI."""
    rows = []
    for over in ("mpi", "shared memory", "gloo"):
        times, _ = _times("messages.measure", "mpi" if over == "mpi" else "gloo",
                          over=over, channels=settings.message_channels,
                          seconds=settings.message_seconds)  # fmt: skip
        rows += [{"over": over, "ranks": 2, "channels": int(C),
                  "microseconds": {name: 1e3 * median_ms(t) for name, t in taken.items()}}
                 for C, taken in times.items()]  # fmt: skip
    return rows


def model(settings: Settings) -> list[Row]:
    """Microseconds of the forward messages of ResNet-50's 53 layers on a cluster."""
    return scaling.table(scaling.Cluster(), scaling.RESNET50)


def reversible_time(settings: Settings) -> list[Row]:
    rows = []
    options = {"pixels": settings.reversible_size, "seconds": settings.resnet_seconds}
    for name, batch in settings.reversible_timed:
        times, _ = _times("reversible.measure_time", "single process", 1, model=name, batch=batch,
                          **options)  # fmt: skip
        compared = _compared({"stored": (times[""]["reversible"], times[""]["stored"])})
        rows.append({"model": name, "batch": batch, **compared})
    return rows


def neighbours(settings: Settings) -> list[Row]:
    """A row for each layer beside batch norm and each peer, in one process."""
    times, _ = _times("neighbours.measure", "single process", 1, flax=settings.flax_shapes,
                      observations=settings.observations, images=settings.group_shape,
                      seconds=settings.seconds)  # fmt: skip
    return [
        {"layer": label, "beside": name, **_compared({"peer": (taken[layer.OURS], t)})}
        for label, taken in times.items()
        for name, t in taken.items()
        if name != layer.OURS
    ]


# In the order of the report.
PARTS: dict[str, Callable[[Settings], list[Row]]] = {
    "torch": partial(one_layer, "layer.measure_torch", "mpi"),
    "relu": partial(one_layer, "layer.measure_torch", "mpi", relu=True),
    "chainer": partial(one_layer, "layer.measure_chainer", "chainermn naive"),
    "resnet": network,
    "compiled": compiled,
    "messages": messages,
    "model": model,
    "reversible_time": reversible_time,
    "neighbours": neighbours,
}


def _beside_one(ours: str, times: Mapping[str, Mapping[str, Seconds]], notes: Row) -> list[Row]:
    """A row for each layout, in which all models took turns."""
    return [
        {"layout": layout, **notes,
         **_compared({name: (taken[ours], t) for name, t in taken.items() if name != ours})}
        for layout, taken in times.items()
    ]  # fmt: skip


def _compared(pairs: Mapping[str, tuple[Seconds, Seconds]]) -> Row:
    """Our time divided by that of each peer: on the wall and of the processor."""
    (ours, _), *_ = pairs.values()
    return {
        "rounds": {name: len(t) for name, (_, t) in pairs.items()},
        "milliseconds": {layer.OURS: median_ms(ours)}
        | {name: median_ms(t) for name, (_, t) in pairs.items()},
        "ratio": {name: ratio(*pair) for name, pair in pairs.items()},
        "processor": {name: ratio(*pair, PROCESSOR) for name, pair in pairs.items()},
    }


def ratio(times: Seconds, others: Seconds, clock: int = WALL) -> float:
    """Median over the rounds of `times / others`; both come from the same rounds."""
    return float(np.median(times[:, clock] / others[:, clock]))
