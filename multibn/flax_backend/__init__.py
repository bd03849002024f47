"""Batch normalization for flax.nnx and flax.linen, synchronized along a mesh axis."""

from multibn.flax_backend.convert import convert_batch_norm as convert_batch_norm
from multibn.flax_backend.convert import revert_batch_norm as revert_batch_norm
from multibn.flax_backend.functional import sync_batch_norm as sync_batch_norm
from multibn.flax_backend.nnx import BatchNorm as BatchNorm
from multibn.flax_backend.precise_bn import update_bn_stats as update_bn_stats
