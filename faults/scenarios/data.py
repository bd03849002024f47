"""Data and states that differ between the ranks."""

import math

from faults.scenarios._scenario import differ, of_rank_1, scenario
from faults.trial import SAMPLES, Trial


@scenario("an empty batch on a rank")
def empty(trial: Trial) -> None:
    trial.build()
    trial.mark()
    for _ in range(3):
        trial.step([SAMPLES, 0, SAMPLES])


@scenario("second derivatives, one sample on a rank", setups=("chainermn",))
def second_derivatives(trial: Trial) -> None:
    trial.build("branches")
    trial.mark()
    trial.trainee.penalizes = True
    trial.step([SAMPLES, 1, SAMPLES])


@scenario(
    "one sample on all ranks together",
    says=r"need more than 1 value per channel over all ranks: got 1 on 3 rank\(s\)",
)
def one_value(trial: Trial) -> None:
    trial.begin()
    trial.step([0, 1, 0])


_NON_FINITE = (
    r"statistics of layer1\.0\.bn1 are not finite: .* on rank\(s\) \[1\] of 3\. "
    r"Check the preceding"
)

nan = of_rank_1("NaN in the input of a rank", lambda trial: trial.spoil(math.nan), says=_NON_FINITE)
infinity = of_rank_1(
    "infinity in the input of a rank",
    lambda trial: trial.spoil(math.inf),
    says=_NON_FINITE,
)
refused = of_rank_1(
    "an input that does not fit on a rank",
    lambda trial: trial.set_in_network("misses_stem"),
    says=r"layer1\.0\.bn1 \(forward, .*\): the input was rejected on rank\(s\) \[1\] of 3|"
    r"must have (4 channels|channels of shape \(4,\))",
)


@scenario(
    "statistics changed on a rank, then check_sync",
    says=r"1 of \d+ arrays are not the same on all 3 ranks.*by up to 0\.001 on rank 1",
)
def diverged(trial: Trial) -> None:
    trial.begin()
    trainee = trial.trainee
    if trial.at_fault:
        getattr(trainee.norms()[0], trainee.average)[0] += 1e-3
    trainee.check_sync(trainee.model)


@scenario(
    "another version of the library on a rank",
    says=differ(r"\d.*", r"0\.0\.1", "the ranks must run the same version of multibn: "),
)
def version(trial: Trial) -> None:
    from multibn import _version

    own = _version.__version__
    trial.build()
    trial.mark()
    try:
        if trial.at_fault:
            _version.__version__ = "0.0.1"
        trial.steps(2)
    finally:
        _version.__version__ = own
