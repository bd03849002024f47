"""Data of two domains (Wu and Johnson, 2021, arXiv:2105.07576, section 5 and Table 5).

MNIST-1D on two ranks. The other domain has the same sequences at twice the amplitude, moved by 1
and with noise. One study trains on the first domain and evaluates on the other. The second study
trains on both, a domain on each rank.
"""

from copy import deepcopy
from typing import Any

import pictures
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor, nn

from benchmarks.tables import markdown
from evidence import shown, training
from multibn.torch import convert_sync_batchnorm, sync_running_stats, update_bn_stats

NAME = "domains"
SIZES = (2,)
STEPS = 200
DOMAINS = ("original", "other")
# Rows of the table: how the model was trained, and the statistics of the evaluation.
CASES = {
    "first domain only": ("of the training data", "of the domain of the evaluation"),
    "a domain on each rank, plain": (
        "of rank 0",
        "pooled over the ranks",
        "of the domain of the evaluation",
    ),
    "a domain on each rank, synchronized": ("of all ranks",),
}


def _other(x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return 2 * x + 1 + 0.3 * torch.randn(x.shape, generator=generator)


def measure(seed: int) -> list[dict[str, Any]]:
    """Errors in both domains. Collective; rank 0's counts."""
    rank, size = dist.get_rank(), dist.get_world_size()
    part = slice(rank, None, size)
    (x, y), (test_x, test_y) = training.mnist1d()
    train = {"original": x, "other": _other(x)}
    test = {"original": test_x, "other": _other(test_x)}
    rows: list[dict[str, Any]] = []

    def add(model: nn.Module, trained: str, statistics: str, domains: Any = DOMAINS) -> None:
        model = deepcopy(model).eval()
        for domain in domains:
            wrong = training.error(model, test[domain], test_y)
            row = {"trained": trained, "statistics": statistics, "domain": domain, "error": wrong}
            rows.append(row)

    def add_by_domain(model: nn.Module, trained: str) -> None:
        for domain in DOMAINS:
            own = deepcopy(model).train()
            update_bn_stats(own, train[domain][part].split(training.RANK_BATCH), progress=False)
            add(own, trained, "of the domain of the evaluation", [domain])

    one, plain, synchronized = CASES
    model = convert_sync_batchnorm(training.network(seed))
    training.train(model, x, y, part, STEPS, seed)
    add(model, one, "of the training data")
    add_by_domain(model, one)

    own = train[DOMAINS[rank]]
    model = training.network(seed)
    training.train(model, own, y, part, STEPS, seed)
    add(model, plain, "of rank 0")
    add_by_domain(model, plain)
    sync_running_stats(model, how="pool")
    add(model, plain, "pooled over the ranks")

    model = convert_sync_batchnorm(training.network(seed))
    training.train(model, own, y, part, STEPS, seed)
    add(model, synchronized, "of all ranks")
    return rows


def table(rows: shown.Rows) -> str:
    columns = ("trained on", "statistics", *(f"error, {domain} domain" for domain in DOMAINS))
    lines = [(*case, *(shown.cell(_error(rows, case, domain)) for domain in DOMAINS))
             for case in _cases()]  # fmt: skip
    return markdown(columns, lines)


def draw(rows: shown.Rows) -> Figure:
    figure = Figure(figsize=(pictures.WIDTH, 5.2), layout="constrained")
    axes = figure.subplots()
    looks = dict(zip(CASES, (pictures.OTHER, pictures.PLAIN, pictures.SYNCHRONIZED), strict=True))
    for k, case in enumerate(_cases()):
        color = looks[case[0]]
        for i, domain in enumerate(DOMAINS):
            mean, low, high = _error(rows, case, domain)
            at = k + 0.28 * i
            face = "none" if i else color
            axes.barh(at, mean, 0.26, edgecolor=color, color=face, hatch="///" if i else "")
            axes.errorbar(
                mean, at, xerr=[[mean - low], [high - mean]], color=pictures.INK, capsize=3
            )
        axes.text(0.5, k - 0.2, f"{case[0]}; {case[1].removeprefix('of ')}", size=10)
    full = Patch(facecolor=pictures.INK, label="original domain")
    hatched = Patch(facecolor="none", edgecolor=pictures.INK, hatch="///", label="other domain")
    axes.legend(handles=[full, hatched], loc="lower right")
    axes.set(title="Error, %, by what was trained; by whose statistics", yticks=[], xlim=0)
    axes.invert_yaxis()
    return figure


def _cases() -> list[tuple[str, str]]:
    return [(trained, s) for trained, statistics in CASES.items() for s in statistics]


def _error(rows: shown.Rows, case: tuple[str, str], domain: str) -> tuple[float, float, float]:
    return shown.interval(rows, "error", trained=case[0], statistics=case[1], domain=domain)
