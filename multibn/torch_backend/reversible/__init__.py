"""Reversible blocks: the backward pass recomputes activations instead of storing them."""

from multibn.torch_backend.reversible.mvit.config import RevMViTConfig as RevMViTConfig
from multibn.torch_backend.reversible.mvit.model import ReversibleMViT as ReversibleMViT
from multibn.torch_backend.reversible.mvit.model import RevMViT as RevMViT
from multibn.torch_backend.reversible.sequence import ReversibleSequence as ReversibleSequence
