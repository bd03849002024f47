"""fvcore's precise batch norm, as PySlowFast and detectron2 call it."""

import warnings

with warnings.catch_warnings():  # fvcore.nn scripts a loss when it is imported
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    from fvcore.nn.precise_bn import get_bn_modules as get_bn_modules
    from fvcore.nn.precise_bn import update_bn_stats as update_bn_stats
