"""The parts of the benchmark: launches each part, and evaluates its times."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

from benchmarks import layer, resnet, scaling
from benchmarks.timing import PROCESSOR, Seconds, geometric_mean, median_ms, ratio, slowest, spread
from multibn._launch import run_workers

Row = dict[str, Any]
_TIMEOUT = 240.0


@dataclass(frozen=True)
class Settings:
    """The sizes that are measured; each comparison takes about `seconds`."""

    shapes: Sequence[tuple[int, ...]] = tuple(layer.SHAPES)
    seconds: float = 5.5
    blocks: tuple[int, ...] = resnet.BLOCKS
    images: tuple[int, ...] = (8, 3, 112, 112)
    resnet_seconds: float = 45.0
    worlds: tuple[int, ...] = (2, 4, 8)
    collective_channels: tuple[int, ...] = (64, 256, 2048)
    collective_seconds: float = 1.5
    compiled_shape: tuple[int, ...] = (8, 256, 28, 28)
    compiled_seconds: float = 15.0
    reversible_size: int = 224
    reversible_models: tuple[str, ...] = (
        "rev_vit_s", "rev_vit_b", "rev_vit_l", "rev_mvit_b", "4 blocks", "12 blocks", "24 blocks",
    )  # fmt: skip
    reversible_timed: tuple[tuple[str, int], ...] = (("rev_vit_s", 8), ("rev_mvit_b", 2))
    reversible_rounds: int = 7


# Seconds instead of minutes: tests that every part runs; the numbers mean nothing.
QUICK = Settings(
    shapes=((2, 3, 4, 4), (8, 4)),
    seconds=0.0,
    blocks=(1,),
    images=(2, 3, 16, 16),
    resnet_seconds=0.0,
    worlds=(2,),
    collective_channels=(1, 8),
    collective_seconds=0.0,
    compiled_shape=(2, 8, 4, 4),
    compiled_seconds=0.0,
    reversible_size=32,
    reversible_models=("1 blocks",),
    reversible_timed=(("1 blocks", 2),),
    reversible_rounds=2,
)


def _run(part: str, launcher: str, size: int, **options: Any) -> tuple[dict[str, Seconds], Any]:
    """Times of the slowest rank, and the notes of rank 0. Raises WorkerError."""
    worker = ["-m", "benchmarks.worker", part, json.dumps(options)]
    written = run_workers(f"{part}, {size} rank(s)", launcher, size, worker, timeout=_TIMEOUT)
    return slowest([dict(rank.arrays) for rank in written]), written[0].notes


def torch_layer(settings: Settings) -> list[Row]:
    times, notes = _run("layer torch", "mpiexec", 2, shapes=settings.shapes,
                        seconds=settings.seconds)  # fmt: skip
    return _layer_rows(times, notes, settings.shapes)


def relu(settings: Settings) -> list[Row]:
    """The layer and a ReLU."""
    shapes = [shape for shape in settings.shapes if len(shape) == 4]
    times, notes = _run("layer torch", "mpiexec", 2, shapes=shapes, seconds=settings.seconds,
                        relu=True)  # fmt: skip
    return _layer_rows(times, notes, shapes)


def chainer_layer(settings: Settings) -> list[Row]:
    times, notes = _run("layer chainer", "mpiexec", 2, shapes=settings.shapes,
                        seconds=settings.seconds)  # fmt: skip
    return _layer_rows(times, notes, settings.shapes)


def network(settings: Settings) -> list[Row]:
    times, notes = _run("resnet", "mpiexec", 2, blocks=settings.blocks, batch=settings.images,
                        seconds=settings.resnet_seconds)  # fmt: skip
    rows = []
    for layout in ("NCHW", "channels_last"):
        ours = times[f"{layout}/synchronized"]
        peers = {peer: times[f"{layout}/{peer}"] for peer in ("local", "waiting")}
        rows.append({
            "layout": layout, **notes, "rounds": len(ours),
            "milliseconds": {
                layer.OURS: median_ms(ours), **{peer: median_ms(t) for peer, t in peers.items()},
            },
            **_compared({peer: (ours, t) for peer, t in peers.items()}),
        })  # fmt: skip
    return rows


def compiled(settings: Settings) -> list[Row]:
    """A residual block under torch.compile, beside the local block and beside both without."""
    times, notes = _run("compiled", "mpiexec", 2, shape=settings.compiled_shape,
                        seconds=settings.compiled_seconds)  # fmt: skip
    rows = []
    for layout in dict.fromkeys(name.partition("/")[0] for name in times):
        taken = {
            name.partition("/")[2]: t for name, t in times.items() if name.startswith(f"{layout}/")
        }
        ours = taken.pop("compiled synchronized")
        rows.append({
            "layout": layout, **notes, "rounds": len(ours), "milliseconds": median_ms(ours),
            **_compared({name: (ours, t) for name, t in taken.items()}),
        })  # fmt: skip
    return rows


def calls(settings: Settings) -> list[Row]:
    """Calls of Python functions in a layer's step."""
    worlds = (("mpi", "mpiexec", 2), ("gloo", "torchrun", 2), ("gloo", "torchrun", 1))
    return [{"over": over, "ranks": size, **_run(f"calls {over}", launcher, size)[1]}
            for over, launcher, size in worlds]  # fmt: skip


def messages(settings: Settings) -> list[Row]:
    """A layer's message with all checks, and the bare allreduce of torch.distributed or MPI."""
    rows = []
    for over in ("mpi", "shared memory", "gloo"):
        part, launcher = ("mpi", "mpiexec") if over == "mpi" else ("gloo", "torchrun")
        times, _ = _run(f"messages {part}", launcher, 2, over=over,
                        channels=settings.collective_channels,
                        seconds=settings.collective_seconds)  # fmt: skip
        rows += [{
            "over": over, "ranks": 2, "channels": C,
            "microseconds": {name: 1e3 * median_ms(times[f"{C}/{name}"])
                             for name in ("checked", "bare")},
        } for C in settings.collective_channels]  # fmt: skip
    return rows


def collectives(settings: Settings) -> list[Row]:
    """Measured times, and the model, which is fitted to the allreduce of two ranks."""
    rows = []
    for over, launcher in (("mpi", "mpiexec"), ("gloo", "torchrun")):
        microseconds = {}
        for W in settings.worlds:
            times, _ = _run(f"collectives {over}", launcher, W, over=over,
                            channels=settings.collective_channels,
                            seconds=settings.collective_seconds)  # fmt: skip
            microseconds[W] = {name: 1e3 * median_ms(t) for name, t in times.items()}
        channels = settings.collective_channels
        pair = {C: microseconds[2][f"{C}/allreduce"] for C in channels}
        machine = scaling.Machine.fitted(over, os.cpu_count() or 1, pair)
        ways = ("allreduce", "all_gather", "grouped", "hierarchical")
        for W, C, way in product(settings.worlds, channels, ways):
            measured = microseconds[W][f"{C}/{way}"]
            rows.append({
                "over": over, "ranks": W, "channels": C, "way": way, "microseconds": measured,
                "model": machine.predict(way, W, C),
            })  # fmt: skip
    return rows


def model(settings: Settings) -> list[Row]:
    return scaling.table(scaling.Cluster(), scaling.RESNET50)


def reversible_memory(settings: Settings) -> list[Row]:
    options = {"models": settings.reversible_models, "pixels": settings.reversible_size, "batch": 2}
    rows: list[Row] = _run("reversible memory", "", 1, **options)[1]["rows"]
    for row in rows:
        row["ratio"] = {name: row["stored"][name] / row["reversible"][name]
                        for name in row["stored"]}  # fmt: skip
    return rows


def reversible_time(settings: Settings) -> list[Row]:
    rows = []
    for model, batch in settings.reversible_timed:
        times, _ = _run("reversible time", "", 1, model=model, pixels=settings.reversible_size,
                        batch=batch, rounds=settings.reversible_rounds)  # fmt: skip
        rows.append({
            "model": model, "batch": batch, "rounds": len(times["stored"]),
            "milliseconds": {mode: median_ms(taken) for mode, taken in times.items()},
            **_compared({"stored": (times["reversible"], times["stored"])}),
        })  # fmt: skip
    return rows


# In the order of the report.
PARTS: dict[str, Callable[[Settings], Any]] = {
    "torch": torch_layer,
    "relu": relu,
    "chainer": chainer_layer,
    "resnet": network,
    "compiled": compiled,
    "calls": calls,
    "messages": messages,
    "collectives": collectives,
    "model": model,
    "reversible_memory": reversible_memory,
    "reversible_time": reversible_time,
}


def _layer_rows(
    times: Mapping[str, Seconds], notes: Row, shapes: Sequence[tuple[int, ...]]
) -> list[Row]:
    """One row for each shape and variant: a layout, or a split of the batch."""
    variants = dict.fromkeys(name.rpartition("/")[0] for name in times)
    rows = []
    for shape, variant in product(shapes, ("NCHW", "channels_last", "NC", "even", "uneven")):
        prefix = layer.key(shape, variant, "").rstrip("/")
        if prefix not in variants:
            continue
        by_name = {name.rpartition("/")[2]: t for name, t in times.items()
                   if name.startswith(prefix + "/")}  # fmt: skip
        ours = {name: by_name[layer.beside(name)] for name in by_name
                if layer.beside(name) in by_name}  # fmt: skip
        peers = {name: by_name[name] for name in ours}
        rows.append({
            "shape": list(shape), "variant": variant, "megabytes": 4e-6 * prod(shape), **notes,
            "rounds": {name: len(t) for name, t in peers.items()},
            "milliseconds": {
                layer.OURS: median_ms(next(iter(ours.values()))),
                **{name: median_ms(t) for name, t in peers.items()},
            },
            **_compared({name: (ours[name], t) for name, t in peers.items()}),
        })  # fmt: skip
    return rows


def _compared(pairs: Mapping[str, tuple[Seconds, Seconds]]) -> Row:
    """Our time divided by that of each peer: on the wall, with its spread, and of the processor."""
    return {
        "ratio": {name: ratio(*pair) for name, pair in pairs.items()},
        "spread": {name: spread(*pair) for name, pair in pairs.items()},
        "processor": {name: ratio(*pair, PROCESSOR) for name, pair in pairs.items()},
    }


def targets(results: Mapping[str, Any]) -> list[Row]:
    """The targets, as far as `results` has the measurements: {what, value, bound, met}."""
    judged: list[Row] = []

    def judge(what: str, bound: float, values: Sequence[float], pick: Any) -> None:
        if values:
            value = float(pick(values))
            judged.append({"what": what, "value": value, "bound": bound, "met": value <= bound})

    rows = [row for row in results.get("torch", []) if "ratio" in row]
    with_relu = [row for row in results.get("relu", []) if "ratio" in row]
    for what, measured, names, bound in (
        ("NCHW: step", rows, ("NCHW", "NC"), 0.50),
        ("channels_last: step", rows, ("channels_last",), 0.95),
        ("NCHW: step with ReLU", with_relu, ("NCHW",), 0.40),
        ("channels_last: step with ReLU", with_relu, ("channels_last",), 0.70),
    ):
        to_local = [r["ratio"][layer.LOCAL] for r in measured if r["variant"] in names]
        judge(f"{what} / {layer.LOCAL}'s, geometric mean", bound, to_local, geometric_mean)
    judge("(256, 1024): step / nn.BatchNorm1d's", 1.3,
          [r["ratio"][layer.LOCAL] for r in rows if r["variant"] == "NC"], max)  # fmt: skip
    judge("25 MB: step / eight copies, worst", 1.6,
          [r["ratio"][layer.COPIES] for r in rows if r["megabytes"] > 25], max)  # fmt: skip
    judge("step / the naive formula's, geometric mean", 0.22,
          [r["ratio"][layer.NAIVE] for r in rows], geometric_mean)  # fmt: skip
    for split in ("even", "uneven"):
        to_peer = [r["ratio"][layer.CHAINERMN] for r in results.get("chainer", [])
                   if r.get("variant") == split]  # fmt: skip
        judge(f"Chainer, {split} split: step / ChainerMN's, geometric mean", 0.222, to_peer,
              geometric_mean)  # fmt: skip
    judge("network: step / with local batch norms, worst", 1.0,
          [r["ratio"]["local"] for r in results.get("resnet", []) if "ratio" in r],
          max)  # fmt: skip
    for peer, bound in (("compiled local", 1.05), ("eager synchronized", 1.0)):
        judge(f"compiled block: step / the {peer} one's, worst", bound,
              [r["ratio"][peer] for r in results.get("compiled", []) if "ratio" in r],
              max)  # fmt: skip
    judge("Python calls of multibn in a step over MPI", 60,
          [r["synchronized"]["multibn"] for r in results.get("calls", [])
           if r.get("over") == "mpi"], max)  # fmt: skip
    judge("a checked message of 256 channels in shared memory, microseconds", 20,
          [r["microseconds"]["checked"] for r in results.get("messages", [])
           if (r.get("over"), r.get("channels")) == ("shared memory", 256)], max)  # fmt: skip
    least = {"rev_vit_s": 8.9, "rev_vit_b": 7.9, "rev_vit_l": 14.2, "rev_mvit_b": 2.0}
    for row in results.get("reversible_memory", []):
        if row.get("model") in least:
            what = f"{row['model']}, {row['attention']} attention: peak / the stored run's"
            judge(what, 1 / least[row["model"]], [1 / row["ratio"]["peak"]], max)
    judge("reversible: step / the stored run's, worst", 1.35,
          [r["processor"]["stored"] for r in results.get("reversible_time", []) if "ratio" in r],
          max)  # fmt: skip
    return judged
