"""Callbacks and the plugin for Lightning."""

from multibn.torch_backend.integrations.lightning import MultiBNLayerSync as MultiBNLayerSync
from multibn.torch_backend.integrations.lightning import PreciseBN as PreciseBN
