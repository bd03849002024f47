"""The layer for flax.nnx."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from multibn._typing import Array, RunningVar, Weighting
from multibn.flax_backend.functional import Batch, Options, floating, run
from multibn.kernels import steps


class Population(nnx.Variable):
    """The sums of all inputs of a layer, while `update_bn_stats` runs."""

    def add(self, batch: Batch) -> None:
        """Add the elements of one more batch, unless it is not finite."""
        with jax.enable_x64(True):
            mean, var, count, _ = batch.statistics
            sums = self[...] + steps.pack(mean, var + mean * mean, count, count)
            self[...] = jnp.where(count > 0, sums, self[...])


class BatchNorm(nnx.BatchNorm):
    """flax.nnx.BatchNorm, exact over devices, masks and large means.

    Takes that layer's place: arguments, state (`scale`, `bias`, `mean`, `var`) and the dtype of the
    output are the same. Under jax.jit over sharded arrays the program is that of one process, and
    `axis_name` is None. Under jax.shard_map and jax.pmap the devices along `axis_name` share: one
    psum each way of 2C+2 float64 numbers, and one of C+1 more for float64 input. Devices hold
    uneven shares of a batch, or nothing, by masks. All transformations of JAX apply.

    Parameters
    ----------
    num_features
        C, the channels.
    weighting
        What a device counts for: `"element"` for its elements, which makes the statistics those of
        the batch of all devices; `"sample"` for its samples; `"rank"` for 1, as a mean over devices
        does.
    running_var
        The variance that moves `var`: `"biased"`, flax's; `"unbiased_global"`, times N/(N-1) with
        the N elements of a channel on all devices, torch's; `"unbiased_local"`, with this device's
        elements, ChainerMN's, which differs from device to device.
    sum_dtype
        Of sums over a batch of float32 or 16-bit input: float64, or float32 for devices that are
        slow in float64, at the cost of a relative error of 1e-7 in the variance. Messages are
        float64.
    **options
        By name, as flax.nnx.BatchNorm's: `rngs`, `use_running_average`, `axis`, `momentum`,
        `epsilon`, `dtype`, `param_dtype`, `use_bias`, `use_scale`, `axis_name`,
        `axis_index_groups`, ... `momentum` is the decay, 1 less that of torch.
        `use_fast_variance` plays no part: the variance is the stable one, always.

    Raises
    ------
    TypeError, ValueError
        If an option has another value than above. Where JAX traces: if `axis_name` is not bound; if
        `axis_index_groups` does not cover the axis, or is under a jax.shard_map with `check_vma`;
        if the input is not floating-point, has other channels, no element, or one value per
        channel; if `mask` or `lengths` does not fit.
    FloatingPointError
        If an input has NaN or infinity, outside of JAX's transformations; float16 is let through.
        Inside of jax.jit, the output is NaN, and running statistics stay as they are.

    Notes
    -----
    Running statistics have the dtype of the state, float32 as flax makes it; a state of float64
    stays one. float64 inside needs no jax_enable_x64.

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
        super().__init__(num_features, **options)
        self.weighting, self.running_var, self.sum_dtype = weighting, running_var, sum_dtype
        Options.of(self)

    def __call__(
        self,
        x: Array,
        use_running_average: bool | None = None,
        *,
        mask: Array | None = None,
        lengths: Array | None = None,
    ) -> Array:
        """Normalize an input, by its batch or by running statistics.

        Parameters
        ----------
        x
            Shape `(N, *spatial, C)`, or with the channels on `axis`.
        use_running_average
            Whether by running statistics; None for the layer's own option.
        mask
            Booleans that broadcast to `x`, with 1 for the channels as flax's: True for the elements
            that count. Others take no part, whatever they hold, and the output is 0 there.
        lengths
            Integers of shape `(N,)`: the elements along axis 1 that count in each sample.
        """
        use = self.use_running_average if use_running_average is None else use_running_average
        if use is None:
            raise ValueError("`use_running_average` must be a bool in the call, or of the layer.")
        options, x = Options.of(self), floating(x)
        scale, bias = (v if v is None else v[...] for v in (self.scale, self.bias))
        running = self.mean[...], self.var[...]
        x, *_ = self.promote_dtype((x, *running, scale, bias), dtype=self.dtype)
        batch = run(x, scale, bias, running, mask, lengths, options, use_running=use)
        if hasattr(self, "population") and not use:
            self.population.add(batch)
        elif not use:
            self.mean[...], self.var[...] = batch.running
        return batch.y
