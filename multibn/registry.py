"""mmengine's registries of the scope "multibn": `dict(type="multibn.PreciseBNHook")`.

For a type with a scope, mmengine imports the module `<scope>.registry`, so a config needs no
`custom_imports`. Only mmengine and the integration import this module. `locations` are imported
when a config first asks for a type.
"""

from mmengine.registry import HOOKS as MMENGINE_HOOKS
from mmengine.registry import MODELS as MMENGINE_MODELS
from mmengine.registry import Registry

_LOCATIONS = ["multibn.torch_backend.integrations.mmengine"]

HOOKS = Registry("hook", parent=MMENGINE_HOOKS, scope="multibn", locations=_LOCATIONS)
MODELS = Registry("model", parent=MMENGINE_MODELS, scope="multibn", locations=_LOCATIONS)
