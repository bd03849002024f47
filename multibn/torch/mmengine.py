"""The hook for mmengine."""

from multibn.torch_backend.integrations.mmengine import PreciseBNHook as PreciseBNHook
