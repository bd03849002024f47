"""mmengine's registries for the scope "multibn": `dict(type="multibn.PreciseBNHook")`.

For a type with a scope, mmengine imports the module `<scope>.registry`, so a config needs no
`custom_imports`. Only mmengine and the integration import this module. mmengine imports the
`locations` when a config first uses a type of this scope.
"""

from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import Registry

_LOCATIONS = ["multibn.torch_backend.integrations.mmengine"]

HOOKS = Registry("hook", parent=MMENGINE_HOOKS, scope="multibn", locations=_LOCATIONS)
MODELS = Registry("model", parent=MMENGINE_MODELS, scope="multibn", locations=_LOCATIONS)
