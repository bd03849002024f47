"""Reversible networks: their memory does not grow with their depth."""

from multibn.torch_backend.reversible import ReversibleMViT as ReversibleMViT
from multibn.torch_backend.reversible import ReversibleSequence as ReversibleSequence
from multibn.torch_backend.reversible import RevMViT as RevMViT
from multibn.torch_backend.reversible import RevMViTConfig as RevMViTConfig
