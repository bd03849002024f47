"""The parity command's cases on four devices, and what the command must not let through."""

from multibn.parity import devices
from tests.flax_backend.on_devices import NUM_DEVICES

CASES = ["uneven-float64", "empty-rank", "float16", "masked-sample-weights", "local-count-var"]


def check_cases_of_the_parity_command() -> None:
    for over, names in (("shard_map", CASES), ("pmap", CASES[1:2])):
        errors = devices.measure(None, names, NUM_DEVICES, over)
        assert {e.case for e in errors} == {*names}
        assert max(errors).ratio < 1, max(errors)


def check_devices_that_share_nothing_are_broken() -> None:
    worst = max(devices.measure(None, ["float32"], NUM_DEVICES, axis_name=None))
    assert worst.ratio > 1e3, worst
