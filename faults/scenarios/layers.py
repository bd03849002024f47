"""Layers that differ between the ranks."""

from datetime import timedelta
from typing import Any

from faults.models import CHANNELS
from faults.scenarios._scenario import SILENCE, scenario
from faults.setups import OURS
from faults.trial import Trial

_PLACES = r"the ranks are in different places: "
# DistributedDataParallel compares the parameters when it is built, before any layer runs. The rank
# that differs ends by its error, and torchrun ends the others.
_NOT_DDP = tuple(name for name in OURS if name != "ddp")
_SHAPES_UNDER_DDP = {"ddp": r"params\[0\] in this process with sizes .* appears not to match"}


@scenario(
    "another number of channels on a rank",
    says=r"have built layer1\.0\.bn1 differently: rank\(s\) \[0, 2\] in 4 channels; "
    r"rank\(s\) \[1\] in 5 channels",
    others_say=_SHAPES_UNDER_DDP,
    ends_under=("ddp",),
)
def channels(trial: Trial) -> None:
    trial.mark()
    trial.build(channels=CHANNELS + trial.at_fault)
    trial.steps(2)


@scenario(
    "another dtype on a rank",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn1 \(forward, float64, call 3\); "
    r"rank\(s\) \[1\] in layer1\.0\.bn1 \(forward, float32, call 1\)",
)
def dtype(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        trial.trainee.single_precision()
    trial.steps(2)


def _swap(trial: Trial) -> None:
    trial.trainee.network.layer1[0].swapped = trial.at_fault


def _skip(trial: Trial) -> None:
    trial.trainee.network.layer1[0].skipped = trial.at_fault


@scenario(
    "two layers in another order on a rank, first step",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn1; rank\(s\) \[1\] in layer1\.0\.bn2",
    also_run_on_peers=False,
)
def order_first(trial: Trial) -> None:
    trial.build()
    _swap(trial)
    trial.mark()
    trial.steps(2)


@scenario(
    "... later",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn1 \(forward, float64, call 3\); "
    r"rank\(s\) \[1\] in layer1\.0\.bn2",
)
def order(trial: Trial) -> None:
    trial.begin()
    _swap(trial)
    trial.steps(2)


@scenario(
    "... later, layers of unlike widths",
    says=_PLACES
    + r"(?=.* in narrow \(forward, float64, call 3\))(?=.*1\]? (is )?in wide \(forward)",
)
def order_of_widths(trial: Trial) -> None:
    trial.begin("branches")
    trial.trainee.network.swapped = trial.at_fault
    trial.steps(2)


@scenario(
    "... first step, over a backend of torch's with another name",
    says=_PLACES + r"rank\(s\) \[0, 2\] in narrow; rank\(s\) \[1\] in wide\.",
    setups=("shared memory", "gloo"),
    also_run_on_peers=False,
)
def other_backend(trial: Trial) -> None:
    import torch.distributed as dist

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)

    dist.Backend.register_backend("other", make, devices=["cpu"])
    group = dist.new_group(list(range(trial.size)), backend="other")
    trial.build("branches", communicator=group)
    trial.trainee.network.swapped = trial.at_fault
    trial.mark()
    trial.steps(2)


@scenario(
    "the layers of a sequence in another order on a rank",
    # Chainer's name of the second of three links is 2.
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer 0; rank\(s\) \[1\] in layer [12]\.",
    setups=_NOT_DDP,
    also_run_on_peers=False,
)
def sequence(trial: Trial) -> None:
    trial.mark()
    trial.build("norm second" if trial.at_fault else "norm first")
    trial.steps(2)


def _two_models(trial: Trial, steps_before: int) -> None:
    """Steps of two models of one architecture; after `steps_before` of them in another order."""
    models = []
    for _ in range(2):
        trial.build()
        models.append(trial.trainee)
    for step in range(steps_before + 2):
        if step == steps_before:
            trial.mark()
            models = models[::-1] if trial.at_fault else models
        for model in models:
            trial.trainee = model
            trial.step()


@scenario(
    "two models of one architecture in another order on a rank, first step",
    says=r"the ranks are in different models, at layer1\.0\.bn1: rank\(s\) \[0, 2\] in the layer "
    r"built as number .*; rank\(s\) \[1\] in the layer built as number ",
    seconds=2.0,  # Python collects what it can let go of before layers are counted
    setups=tuple(name for name in OURS if name != "own"),
    also_run_on_peers=False,
)
def models_first(trial: Trial) -> None:
    _two_models(trial, 0)


@scenario(
    "... later",
    says=_PLACES
    + r"rank\(s\) \[0, 2\] in layer1\.0\.bn1 \(forward, float64, call 3\), 4 channels, "
    r"layer \d+ by the first call; rank\(s\) \[1\] in layer1\.0\.bn1 .*, "
    r"layer \d+ by the first call",
)
def models(trial: Trial) -> None:
    _two_models(trial, 2)


@scenario(
    "another option on a rank",
    says=r"have built layer1\.0\.bn1 differently: rank\(s\) \[0, 2\] in eps=[12]e-05; "
    r"rank\(s\) \[1\] in eps=0\.5",
    also_run_on_peers=False,
)
def options(trial: Trial) -> None:
    trial.build()
    for norm in trial.trainee.norms():
        norm.eps = 0.5 if trial.at_fault else norm.eps
    trial.mark()
    trial.steps(2)


@scenario(
    "a layer left out on a rank, first step",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn2; rank\(s\) \[1\] in layer1\.1\.bn1",
    also_run_on_peers=False,
)
def left_out_first(trial: Trial) -> None:
    trial.build()
    _skip(trial)
    trial.mark()
    trial.steps(2)


@scenario(
    "... later",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn2 .*rank\(s\) \[1\] in layer1\.1\.bn1",
)
def left_out(trial: Trial) -> None:
    trial.begin()
    _skip(trial)
    trial.steps(2)


@scenario(
    "a layer in evaluation on a rank",
    says=_PLACES + r".*layer1\.0\.bn1 .*layer1\.0\.bn2",
)
def layer_in_eval(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        trial.trainee.network.layer1[0].evaluates = True
    trial.steps(2)


@scenario(
    "a rank that evaluates while the others train",
    says=r"waited 3 s in layer1\.0\.bn1 \(forward.*for rank\(s\) \[1\]: rank 1 .* is running",
    seconds=SILENCE,
    needs="has_deadline",
    faulty_rank_may_be_silent=True,
)
def network_in_eval(trial: Trial) -> None:
    trial.begin()
    if trial.at_fault:
        trial.trainee.evaluate()
        for _ in range(2):
            trial.step(backward=False)
        return
    trial.steps(2)


@scenario(
    "no gradient wanted on a rank",
    says=r"whether a backward pass may follow: rank\(s\) \[0, 2\] in layer1\.0\.bn1 \(forward, "
    r"float64, call 3\), with gradients; rank\(s\) \[1\] in layer1\.0\.bn1 .*without gradients",
)
def no_gradient(trial: Trial) -> None:
    trial.begin()
    for _ in range(2):
        trial.step(backward=not trial.at_fault)


@scenario(
    "a backward pass that recomputes on one rank only",
    says=_PLACES + r".*layer1\.1\.bn2 \(backward.*layer1\.0\.bn1 \(forward",
    frameworks=("torch",),
)
def recomputed(trial: Trial) -> None:
    trial.begin()
    trial.trainee.network.recomputes = trial.at_fault
    trial.steps(2)
