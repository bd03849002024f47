"""Synchronized batch norm for flax.nnx: layer, function, conversion and precise statistics."""

from multibn.flax_backend import BatchNorm as BatchNorm
from multibn.flax_backend import convert_batch_norm as convert_batch_norm
from multibn.flax_backend import revert_batch_norm as revert_batch_norm
from multibn.flax_backend import sync_batch_norm as sync_batch_norm
from multibn.flax_backend import update_bn_stats as update_bn_stats
