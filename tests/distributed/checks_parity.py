"""Both surfaces, driven by the launcher's own communicator, against the whole-batch oracle."""

import functools

import numpy as np

from multibn.communicators import Communicator, SingleProcess
from tests.helpers import parity, reference

for _framework, _split, _dtype in parity.cases():
    globals()[f"check_{_framework}_{_split}_{_dtype}"] = functools.partial(
        parity.compare_with_oracle, _framework, _split, _dtype
    )

for _framework in parity.frameworks():
    for _weighting in ("sample", "rank"):
        for _running_var in ("unbiased_local", "biased"):
            globals()[f"check_{_framework}_{_weighting}_{_running_var}"] = functools.partial(
                parity.compare_with_oracle,
                _framework,
                "spatial",
                "float64",
                weighting=_weighting,
                running_var=_running_var,
            )


def check_ordinary_batch_norm_on_the_parts_differs(world: Communicator) -> None:
    """The negative control: without a communicator the oracle is missed."""
    ones, zeros = np.ones(parity.CHANNELS), np.zeros(parity.CHANNELS)
    xs, dys = parity.batches("even", world.size, "float64", seed=0)
    expected = reference.batch_norm(xs, dys, ones, zeros, eps=parity.EPS)
    for framework in parity.frameworks():
        layer = parity.SURFACES[framework](
            ones, zeros, SingleProcess(), eps=parity.EPS, momentum=0.1
        )
        got = layer.train(xs[world.rank], dys[world.rank])
        assert reference.relative_error(got.y, expected.y[world.rank]) > 1e-2
        assert reference.relative_error(got.dx, expected.dx[world.rank]) > 1e-2
