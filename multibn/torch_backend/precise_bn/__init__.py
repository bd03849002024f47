"""Precise batch norm: running statistics of whole passes over data."""

from multibn.torch_backend.precise_bn.update import check_arguments as check_arguments
from multibn.torch_backend.precise_bn.update import second_reader as second_reader
from multibn.torch_backend.precise_bn.update import update_bn_stats as update_bn_stats
from multibn.torch_backend.precise_bn.watched import Estimator as Estimator
