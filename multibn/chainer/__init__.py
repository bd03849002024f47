"""Chainer links whose batch statistics are shared between processes.

Import this module before `chainer`: it makes Chainer 7.8.1 importable on today's NumPy.
"""

from multibn.chainer_backend import FinetunePopulationStatistics as FinetunePopulationStatistics
from multibn.chainer_backend import MultiNodeBatchNormalization as MultiNodeBatchNormalization
from multibn.chainer_backend import check_sync as check_sync
from multibn.chainer_backend import create_mnbn_model as create_mnbn_model
from multibn.chainer_backend import (
    multi_node_batch_normalization as multi_node_batch_normalization,
)
from multibn.chainer_backend import step_statistics as step_statistics
