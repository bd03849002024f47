"""Layers that differ between the ranks."""

from faults.models import CHANNELS
from faults.scenarios._scenario import SILENCE, scenario
from faults.trial import Trial

_PLACES = r"the ranks are in different places: "


@scenario(
    "another number of channels on a rank",
    says=r"have built layer1\.0\.bn1 differently: rank\(s\) \[0, 2\] in 4 channels; "
    r"rank\(s\) \[1\] in 5 channels",
)
def channels(trial: Trial) -> None:
    trial.build(CHANNELS + trial.at_fault)
    trial.mark()
    trial.steps(2)


@scenario(
    "another dtype on a rank",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn1 \(forward, float64, call 3\); "
    r"rank\(s\) \[1\] in layer1\.0\.bn1 \(forward, float32, call 1\)",
)
def dtype(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
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
)
def order_first(trial: Trial) -> None:
    _swap(trial)
    trial.mark()
    trial.steps(2)


@scenario(
    "... later",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn1 \(forward, float64, call 3\); "
    r"rank\(s\) \[1\] in layer1\.0\.bn2",
)
def order(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    _swap(trial)
    trial.steps(2)


@scenario(
    "a layer left out on a rank, first step",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn2; rank\(s\) \[1\] in layer1\.1\.bn1",
)
def left_out_first(trial: Trial) -> None:
    _skip(trial)
    trial.mark()
    trial.steps(2)


@scenario(
    "... later",
    says=_PLACES + r"rank\(s\) \[0, 2\] in layer1\.0\.bn2 .*rank\(s\) \[1\] in layer1\.1\.bn1",
)
def left_out(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    _skip(trial)
    trial.steps(2)


@scenario(
    "a layer in evaluation on a rank",
    says=_PLACES + r".*layer1\.0\.bn1 .*layer1\.0\.bn2",
)
def layer_in_eval(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        trial.trainee.evaluate_layer()
    trial.steps(2)


@scenario(
    "the network in evaluation on a rank",
    says=r"waited 3 s in layer1\.0\.bn1 \(forward.*for rank\(s\) \[1\]: rank 1 .* is running",
    seconds=SILENCE,
    spared=True,
)
def network_in_eval(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    if trial.at_fault:
        trial.trainee.evaluate()
    trial.steps(2)


@scenario(
    "no gradient wanted on a rank",
    says=_PLACES + r".*layer2\.0\.bn2 \(backward.*layer1\.0\.bn1 \(forward",
)
def no_gradient(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    for _ in range(2):
        trial.step(backward=not trial.at_fault)


@scenario(
    "a backward pass that recomputes on one rank only",
    says=_PLACES + r".*layer1\.1\.bn2 \(backward.*layer1\.0\.bn1 \(forward",
    frameworks=("torch",),
)
def recomputed(trial: Trial) -> None:
    trial.steps(2)
    trial.mark()
    trial.trainee.network.recomputes = trial.at_fault
    trial.steps(2)
