"""Data and states that differ between the ranks."""

from faults.scenarios._scenario import scenario
from faults.trial import SAMPLES, Trial


@scenario("an empty batch on a rank")
def empty(trial: Trial) -> None:
    trial.build()
    trial.mark()
    for _ in range(3):
        trial.step([SAMPLES, 0, SAMPLES])


@scenario(
    "one sample on all ranks together",
    says=r"needs more than 1 value per channel over all ranks together: got 1 on 3 rank\(s\)",
)
def one_value(trial: Trial) -> None:
    trial.begin()
    trial.step([0, 1, 0])


_NON_FINITE = (
    r"statistics of layer1\.0\.bn1 are not finite: .* on rank\(s\) \[1\] of 3\. "
    r"Look for their origin"
)


@scenario("NaN in the input of a rank", says=_NON_FINITE)
def nan(trial: Trial) -> None:
    trial.begin()
    trial.step(spoil=float("nan") if trial.at_fault else 0.0)
    trial.step()


@scenario("infinity in the input of a rank", says=_NON_FINITE, also_run_on_peers=False)
def infinity(trial: Trial) -> None:
    trial.begin()
    trial.step(spoil=float("inf") if trial.at_fault else 0.0)
    trial.step()


@scenario(
    "an input that does not fit on a rank",
    says=r"the input of layer1\.0\.bn1 was refused on rank\(s\) \[1\] of 3|"
    r"must have (4 channels|channels of shape \(4,\))",
)
def refused(trial: Trial) -> None:
    trial.begin()
    trial.trainee.network.embeds = not trial.at_fault
    trial.steps(2)


@scenario(
    "statistics changed on a rank, then check_sync",
    says=r"1 of \d+ arrays are not the same on all 3 ranks.*by up to 0\.001 on rank 1",
    also_run_on_peers=False,
)
def diverged(trial: Trial) -> None:
    trial.begin()
    norm = trial.trainee.norms()[0]
    average = norm.running_mean if hasattr(norm, "running_mean") else norm.avg_mean
    if trial.at_fault:
        average[0] += 1e-3
    if hasattr(norm, "running_mean"):
        from multibn.torch_backend import check_sync
    else:
        from multibn.chainer_backend import check_sync  # type: ignore[assignment]
    check_sync(trial.trainee.model)


@scenario(
    "another version of the library on a rank",
    says=r"the ranks must run the same version of multibn: rank\(s\) \[0, 2\] in \d.*; "
    r"rank\(s\) \[1\] in 0\.0\.1",
    also_run_on_peers=False,
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
