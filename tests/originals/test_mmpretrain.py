"""mmpretrain's PreciseBNHook, and the scopes of OpenMMLab's registries."""

from tests.helpers import launch, require


def test_a_config_needs_no_import() -> None:
    """mmengine finds the scope "multibn" by itself, beside the mmengine scope of the default."""
    require.need("torch", "mmengine")
    code = """
from mmengine.registry import HOOKS, MODELS
print(HOOKS.get("PreciseBNHook"))
print(HOOKS.build(dict(type="multibn.PreciseBNHook")))
print(MODELS.build(dict(type="multibn.SyncBatchNorm", num_features=4)))
print(HOOKS.get("multibn.torch_backend.integrations.mmengine.PreciseBNHook").__name__)
"""
    none, hook, layer, by_path = launch.printed(
        "-c", code, interpreter=launch.python()
    ).splitlines()
    assert none == "None"  # mmengine itself has no hook of this name
    assert hook.startswith("<multibn.torch_backend.integrations.mmengine.PreciseBNHook object")
    assert layer.startswith("SyncBatchNorm(4,")
    assert by_path == "PreciseBNHook"
