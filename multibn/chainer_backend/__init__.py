"""Chainer links whose batch statistics are shared between processes.

Import this package before `chainer`: it makes Chainer 7.8.1 importable on today's NumPy.
"""

from multibn.chainer_backend import compat

compat.make_importable()

from multibn.chainer_backend.convert import create_mnbn_model as create_mnbn_model  # noqa: E402
from multibn.chainer_backend.convert import revert_mnbn_model as revert_mnbn_model  # noqa: E402
from multibn.chainer_backend.extensions import (  # noqa: E402
    FinetunePopulationStatistics as FinetunePopulationStatistics,
)
from multibn.chainer_backend.extensions import (  # noqa: E402
    finetune_population_statistics as finetune_population_statistics,
)
from multibn.chainer_backend.forgetting import forget as forget  # noqa: E402
from multibn.chainer_backend.functions import (  # noqa: E402
    multi_node_batch_normalization as multi_node_batch_normalization,
)
from multibn.chainer_backend.links import (  # noqa: E402
    MultiNodeBatchNormalization as MultiNodeBatchNormalization,
)
from multibn.chainer_backend.reversible import (  # noqa: E402
    ReversibleSequence as ReversibleSequence,
)
from multibn.chainer_backend.synchrony import check_sync as check_sync  # noqa: E402
from multibn.chainer_backend.uneven import join as join  # noqa: E402
