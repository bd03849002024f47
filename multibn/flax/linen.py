"""Synchronized batch norm for flax.linen: replaces flax.linen.BatchNorm."""

from multibn.flax_backend.linen import BatchNorm as BatchNorm
