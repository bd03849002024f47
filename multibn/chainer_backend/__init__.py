"""Chainer links whose batch statistics are shared between processes.

Import this package before `chainer`: it makes Chainer 7.8.1 importable on today's NumPy.
"""

from multibn.chainer_backend import compat

compat.make_importable()

from multibn.chainer_backend.check_sync import check_sync as check_sync
from multibn.chainer_backend.convert import create_mnbn_model as create_mnbn_model
from multibn.chainer_backend.extensions import (
    FinetunePopulationStatistics as FinetunePopulationStatistics,
)
from multibn.chainer_backend.functional import (
    multi_node_batch_normalization as multi_node_batch_normalization,
)
from multibn.chainer_backend.links import MultiNodeBatchNormalization as MultiNodeBatchNormalization
from multibn.chainer_backend.step_statistics import step_statistics as step_statistics
