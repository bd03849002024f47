"""Layers that differ between the ranks."""

import gc
from datetime import timedelta
from typing import Any

from faults.networks import CHANNELS
from faults.scenarios._scenario import SILENCE, differ, of_rank_1, scenario
from faults.setups import OURS
from faults.trial import Trial
from multibn import as_communicator

_BUILT = r"have built layer1\.0\.bn1 differently: "
_LATER = r" \(forward, float64, call 3\)"


@scenario(
    "another number of channels on a rank",
    says=differ("4 channels", "5 channels", _BUILT),
    # DistributedDataParallel compares the parameters when it is built, before any layer runs. The
    # rank that differs ends by its error, and torchrun ends the others.
    others_say={"ddp": r"params\[0\] in this process with sizes .* appears not to match"},
    ends_under=("ddp",),
)
def channels(trial: Trial) -> None:
    trial.mark()
    trial.build(channels=CHANNELS + trial.at_fault)
    trial.steps(2)


dtype = of_rank_1(
    "another dtype on a rank",
    lambda trial: trial.trainee.single_precision(),
    says=differ(rf"layer1\.0\.bn1{_LATER}", r"layer1\.0\.bn1 \(forward, float32, call 1\)"),
)

order_first = of_rank_1(
    "two layers in another order on a rank, first step",
    lambda trial: trial.set_in_block("swapped"),
    says=differ(r"layer1\.0\.bn1", r"layer1\.0\.bn2"),
    first=True,
)

order = of_rank_1(
    "... later",
    lambda trial: trial.set_in_block("swapped"),
    says=differ(rf"layer1\.0\.bn1{_LATER}", r"layer1\.0\.bn2"),
)

order_of_widths = of_rank_1(
    "... later, layers of unlike widths",
    lambda trial: trial.set_in_network("swapped"),
    says=rf"the ranks are in different places: (?=.* in narrow{_LATER})"
    r"(?=.*1\]? (is )?in wide \(forward)",
    kind="branches",
    seconds=0.3,  # before anybody would leave a notice
)


@scenario(
    "... first step, over a backend of torch's with another name",
    says=differ("narrow", "wide", end=r"\."),
    setups=("shared memory", "gloo"),
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
    says=differ("layer 0", r"layer [12]\."),  # Chainer's name of the second of three links is 2
    setups=tuple(name for name in OURS if name != "ddp"),
)
def sequence(trial: Trial) -> None:
    trial.mark()
    trial.build("norm second" if trial.at_fault else "norm first")
    trial.steps(2)


@scenario(
    "a further model built first on a rank",
    setups=tuple(name for name in OURS if name != "ddp"),  # which compares parameters when built
)
def built(trial: Trial) -> None:
    for _ in range(1 + trial.at_fault):
        trial.build()
    trial.mark()
    trial.steps(2)


@scenario(
    "two models of one architecture in another order on a rank, after the first steps",
    says=differ(
        rf"layer1\.0\.bn1{_LATER}, 4 channels, layer \d+ in call order",
        r"layer1\.0\.bn1 .*, layer \d+ in call order",
    ),
)
def models(trial: Trial) -> None:
    models = []
    for _ in range(2):
        trial.build()
        models.append(trial.trainee)
    for step in range(4):
        if step == 2:
            trial.mark()
            models = models[::-1] if trial.at_fault else models
        for model in models:
            trial.trainee = model
            trial.step()


def _options(trial: Trial, **options: object) -> None:
    for norm in trial.trainee.norms():
        for name, value in options.items():
            setattr(norm, name, value)


options = of_rank_1(
    "another option on a rank",
    lambda trial: _options(trial, eps=0.5),
    says=differ("eps=[12]e-05", r"eps=0\.5", _BUILT),
    first=True,
)

options_later = of_rank_1(
    "... later",
    lambda trial: _options(trial, nonfinite="skip"),
    says=differ("nonfinite=None", "nonfinite=skip", _BUILT),
)

left_out_first = of_rank_1(
    "a layer left out on a rank, first step",
    lambda trial: trial.set_in_block("skipped"),
    says=differ(r"layer1\.0\.bn2", r"layer1\.1\.bn1"),
    first=True,
)

left_out = of_rank_1(
    "... later",
    lambda trial: trial.set_in_block("skipped"),
    says=differ(r"layer1\.0\.bn2 .*", r"layer1\.1\.bn1"),
)


@scenario(
    "the last layer left out on a rank, then check_sync",
    says=r"the ranks are in different places: (?=.*layer2\.0\.bn2 \(forward)"
    r"(?=.*(check_sync|a sum of float64))",
    seconds=0.3,
)
def last_left_out(trial: Trial) -> None:
    trial.begin()
    trial.trainee.network.layer2[0].skipped = trial.at_fault
    trial.step(backward=False)
    trial.trainee.check_sync(trial.trainee.model)


elsewhere = of_rank_1(
    "a layer on another device on a rank",
    lambda trial: trial.trainee.norms()[0].to("meta"),
    says=r"layer1\.0\.bn1 \(forward, .*: the input was rejected on rank\(s\) \[1\] of 3|"
    r"must be on the device of the input",
    setups=("shared memory", "gloo", "ddp", "mpi", "own"),
)

layer_in_eval = of_rank_1(
    "a layer in evaluation on a rank",
    lambda trial: trial.set_in_block("evaluates"),
    says=r"the ranks are in different places: .*layer1\.0\.bn1 .*layer1\.0\.bn2",
)


def _without_gradients(trial: Trial) -> None:
    for _ in range(2):
        trial.step(backward=False)


def _network_in_eval(trial: Trial) -> None:
    trial.trainee.evaluate()
    _without_gradients(trial)


network_in_eval = of_rank_1(
    "a rank that evaluates while the others train",
    _network_in_eval,
    says=r"waited 3 s in layer1\.0\.bn1 \(forward.*for rank\(s\) \[1\]: rank 1 .* is running",
    then=0,
    seconds=SILENCE,
    own_waits=True,
)

no_gradient = of_rank_1(
    "no gradient wanted on a rank",
    _without_gradients,
    says=differ(
        rf"layer1\.0\.bn1{_LATER}, with gradients",
        r"layer1\.0\.bn1 .*without gradients",
        "only some ranks compute gradients: ",
    ),
    then=0,
)

recomputed = of_rank_1(
    "a backward pass that recomputes on one rank only",
    lambda trial: trial.set_in_network("recomputes"),
    says=r"the ranks are in different places: .*layer1\.1\.bn2 \(backward.*layer1\.0\.bn1 \(fo",
    setups=("shared memory", "gloo", "ddp", "mpi", "own", "naive formula"),
)


@scenario(
    "a layer of ranks 0 and 1 that was deleted, then another network on all",
    setups=tuple(name for name in OURS if name != "ddp"),  # whose network is on all ranks
)
def deleted(trial: Trial) -> None:
    everybody = as_communicator(trial.communicator)
    pair = everybody.split(trial.rank // 2)
    if trial.rank < 2:
        trial.build(communicator=pair)
        trial.steps(2)
        del trial.trainee
        gc.collect()
    trial.begin()
    trial.steps(2)
