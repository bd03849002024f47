"""The batch norm layer for flax.linen."""

from typing import Any

import jax.numpy as jnp
from flax import linen
from flax.linen import dtypes

from multibn._typing import Array, RunningVar, Weighting, check_bool
from multibn.flax_backend.functional import Options, converted, floating, run


class BatchNorm(linen.BatchNorm):
    """flax.linen.BatchNorm that is exact across devices, with masks and for large means.

    Replaces flax.linen.BatchNorm, with the same fields, collections (`params`, `batch_stats`) and
    layer names in a model. Calls have the arguments and errors of `multibn.flax.BatchNorm`. `init`
    needs no bound axis, and accepts any batch.

    Parameters
    ----------
    weighting, running_var, sum_dtype
        As for `multibn.flax.BatchNorm`.
    use_running_average, axis, momentum, epsilon, dtype, param_dtype, use_bias, use_scale
    bias_init, scale_init, axis_name, axis_index_groups, use_fast_variance
    force_float32_reductions, parent, name
        As for flax.linen.BatchNorm. `use_fast_variance` has no effect.

    Examples
    --------
    >>> import jax
    >>> from multibn.flax import linen
    >>> layer = linen.BatchNorm(use_running_average=False, momentum=0.5)
    >>> x = jax.numpy.asarray([[1.0, 5.0], [3.0, 5.0]])
    >>> variables = layer.init(jax.random.key(0), x)
    >>> y, moved = layer.apply(variables, x, mutable=["batch_stats"])
    >>> print(y[:, 0].round(4), moved["batch_stats"]["mean"])
    [-1.  1.] [1.  2.5]
    """

    weighting: Weighting = "element"
    running_var: RunningVar = "biased"
    sum_dtype: Any = jnp.float64

    @linen.compact
    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
        lengths: Array | None = None,
    ) -> Array:
        name = "use_running_average"
        use_running = linen.merge_param(name, self.use_running_average, use_running_average)
        check_bool(use_running_average=use_running)
        options, x = Options.from_layer(self), floating(x)
        shape = tuple(x.shape[k] for k in options.channel_axes(x.ndim))
        stats_dtype = jnp.float32 if self.force_float32_reductions else self.param_dtype
        mean = self.variable("batch_stats", "mean", jnp.zeros, shape, stats_dtype)
        var = self.variable("batch_stats", "var", jnp.ones, shape, stats_dtype)
        dtype = self.param_dtype
        scale = self.param("scale", self.scale_init, shape, dtype) if self.use_scale else None
        bias = self.param("bias", self.bias_init, shape, dtype) if self.use_bias else None
        x, *_ = dtypes.promote_dtype(x, scale, bias, dtype=self.dtype)
        if mask is not None:  # flax also accepts masks of numbers
            mask = converted("mask", mask).astype(bool)
        use_running |= self.is_initializing()
        running = mean.value, var.value
        batch = run(x, scale, bias, running, mask, lengths, options, use_running=use_running)
        if not use_running:
            mean.value, var.value = batch.running
        return batch.y
