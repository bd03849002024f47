"""The batch norm layer for flax.nnx."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from multibn._typing import Array, RunningVar, Weighting, check_bool, check_int
from multibn.flax_backend.functional import NormResult, Options, floating, run
from multibn.kernels import steps


class Population(nnx.Variable):
    """The sums over all inputs of a layer, while `update_bn_stats` runs."""

    def add(self, batch: NormResult) -> None:
        """Add the sums of a batch, unless the batch is not finite or has no element."""
        with jax.enable_x64(True):
            mean, var, count, _ = batch.statistics
            sums = self[...] + steps.pack(mean, var + mean * mean, count, count)
            self[...] = jnp.where(count > 0, sums, self[...])


class BatchNorm(nnx.BatchNorm):
    """flax.nnx.BatchNorm that is exact across devices, with masks and for large means.

    Replaces flax.nnx.BatchNorm, with the same arguments, state (`scale`, `bias`, `mean`, `var`) and
    output dtype. Under jax.jit over sharded arrays, leave `axis_name` None: statistics cover the
    whole array. Under jax.shard_map and jax.pmap, the devices along `axis_name` share statistics.
    The forward and the backward pass each have one psum of 2C+2 float64 numbers; for float64 input,
    the forward pass has another one of C+1. With masks, devices may hold different numbers of
    samples, or none. All transformations of JAX work.

    Parameters
    ----------
    num_features
        The number of channels C.
    weighting
        How devices are weighted. `"element"`: by elements per channel, for the statistics of the
        batch of all devices. `"sample"`: by samples. `"rank"`: all non-empty devices equally.
    running_var
        The variance that updates `var`. `"biased"`: as in flax. `"unbiased_global"`: as in torch,
        times N/(N-1) for N elements per channel on all devices. `"unbiased_local"`: as in
        ChainerMN, with N on this device; the result may differ between devices.
    sum_dtype
        The dtype of sums over float32 or 16-bit input: float64, or float32 for devices that are
        slow in float64, at the cost of a relative error of 1e-7 in the variance. Sums over devices
        are always float64.
    **options
        Keyword arguments of flax.nnx.BatchNorm: `rngs`, `use_running_average`, `axis`, `momentum`,
        `epsilon`, `dtype`, `param_dtype`, `use_bias`, `use_scale`, `axis_name`,
        `axis_index_groups`, ... As in flax, `momentum` is 1 minus torch's momentum.
        `use_fast_variance` has no effect: the variance is always computed stably.

    Raises
    ------
    TypeError, ValueError
        If an option has a wrong value. While JAX traces: if `axis_name` is not bound; if
        `axis_index_groups` does not cover the axis, or is used with jax.shard_map's `check_vma`; if
        the input is not floating-point, has a wrong number of channels, no element, or one value
        per channel; if `mask` or `lengths` does not fit.
    FloatingPointError
        Outside jax.jit and jax.vmap, if an input contains NaN, infinity or values that overflow,
        unless it is float16. In traced code, the output is NaN and running statistics are not
        updated.

    Notes
    -----
    Running statistics keep the dtype of the state: float32 as flax creates it, or float64. The
    layer computes in float64 internally, without jax_enable_x64.

    Examples
    --------
    >>> import jax
    >>> from flax import nnx
    >>> from multibn.flax import BatchNorm
    >>> layer = BatchNorm(2, momentum=0.5, rngs=nnx.Rngs(0))
    >>> x = jax.numpy.asarray([[1.0, 5.0], [3.0, 5.0]])
    >>> print(layer(x)[:, 0].round(4), layer.mean[...])
    [-1.  1.] [1.  2.5]
    >>> layer.eval()
    >>> print(layer(x)[:, 0].round(4))
    [0. 2.]
    """

    def __init__(
        self,
        num_features: int,
        *,
        weighting: Weighting = "element",
        running_var: RunningVar = "biased",
        sum_dtype: Any = jnp.float64,
        **options: Any,
    ) -> None:
        check_int("num_features", num_features)
        super().__init__(num_features, **options)
        self.weighting, self.running_var, self.sum_dtype = weighting, running_var, sum_dtype
        Options.from_layer(self)

    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
        lengths: Array | None = None,
    ) -> Array:
        """Normalize an input by its batch statistics or by the running statistics.

        Parameters
        ----------
        x
            Shape `(N, *spatial, C)`, or with the channels on `axis`.
        use_running_average
            Whether to normalize by running statistics; None for the layer's option.
        mask
            Booleans that broadcast to `x`, of size 1 along the channels as in flax. True for valid
            elements. Invalid elements are ignored, even NaN, and their output is 0.
        lengths
            Integers of shape `(N,)`: the number of valid elements of each sample along axis 1, or
            along axis 2 of an input `(N, C, L, ...)` with `axis=1`.
        """
        use = self.use_running_average if use_running_average is None else use_running_average
        if use is None:
            raise ValueError(
                "`use_running_average` must be a bool in the call or in the layer: got None in "
                "both. Call model.train() or model.eval() first."
            )
        check_bool(use_running_average=use)
        options, x = Options.from_layer(self), floating(x)
        scale, bias = (v if v is None else v[...] for v in (self.scale, self.bias))
        running = self.mean[...], self.var[...]
        x, *_ = self.promote_dtype((x, *running, scale, bias), dtype=self.dtype)
        batch = run(x, scale, bias, running, mask, lengths, options, use_running=use)
        if hasattr(self, "population") and not use:
            self.population.add(batch)
        elif not use:
            self.mean[...], self.var[...] = batch.running
        return batch.y
