"""Precise batch norm: running statistics of whole passes over data."""

from multibn.torch_backend.precise_bn.estimators import Estimator as Estimator
from multibn.torch_backend.precise_bn.update import update_bn_stats as update_bn_stats
