"""What PySlowFast and detectron2 call of fvcore."""

import warnings

with warnings.catch_warnings():  # fvcore.nn scripts a loss when it is imported
    warnings.filterwarnings("ignore", "`torch.jit.script", DeprecationWarning)
    from fvcore.nn.activation_count import activation_count as activation_count
    from fvcore.nn.distributed import differentiable_all_reduce as differentiable_all_reduce
    from fvcore.nn.flop_count import flop_count as flop_count
    from fvcore.nn.precise_bn import get_bn_modules as get_bn_modules
    from fvcore.nn.precise_bn import update_bn_stats as update_bn_stats
