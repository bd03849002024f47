"""The layer of flax.linen, in the place of flax.linen.BatchNorm."""

from multibn.flax_backend.linen import BatchNorm as BatchNorm
