"""Conversion of a model's state between the names and file formats of Chainer and torch."""

from multibn.checkpoint.files import CheckpointError as CheckpointError
from multibn.checkpoint.pool import pool_states as pool_states
from multibn.checkpoint.translate import Converted as Converted
from multibn.checkpoint.translate import chainer_to_torch as chainer_to_torch
from multibn.checkpoint.translate import convert as convert
from multibn.checkpoint.translate import torch_to_chainer as torch_to_chainer
