"""Replace the batch norm layers of an nnx model, and revert the replacement."""

from typing import Any, TypeVar

import jax.numpy as jnp
from flax import nnx

from multibn._typing import RunningVar, Weighting, list_obstacles
from multibn._warnings import warn
from multibn.flax_backend.functional import Options
from multibn.flax_backend.mesh_axis import AxisName, Groups
from multibn.flax_backend.nnx import BatchNorm

_Model = TypeVar("_Model", bound=nnx.Module)


def convert_batch_norm(
    model: _Model,
    axis_name: AxisName = None,
    *,
    axis_index_groups: Groups = None,
    weighting: Weighting = "element",
    running_var: RunningVar = "biased",
    sum_dtype: Any = jnp.float64,
) -> _Model:
    """Replace every flax.nnx.BatchNorm of a model by `BatchNorm`, in place; return `model`.

    State and flax's options are kept. Layers that are `BatchNorm` already get the new options, too.
    A flax.linen module creates its layers in its code: use `multibn.flax.linen.BatchNorm` there.

    Parameters
    ----------
    model
        A flax.nnx module.
    axis_name, axis_index_groups
        The devices that share statistics, as for flax.nnx.BatchNorm. If both are None, each layer
        keeps its own; if only `axis_name` is None, each layer keeps its axis.
    weighting, running_var, sum_dtype
        As for `BatchNorm`.

    Warns
    -----
    UserWarning
        One warning lists the layers that are not converted, because their class is a subclass of
        flax.nnx.BatchNorm. Another says that the model has no batch norm.

    Examples
    --------
    >>> from flax import nnx
    >>> from multibn.flax import convert_batch_norm
    >>> model = nnx.Sequential(nnx.BatchNorm(2, rngs=nnx.Rngs(0)))
    >>> convert_batch_norm(model, "devices").layers[0].weighting
    'element'
    """
    given = {"axis_name": axis_name, "axis_index_groups": axis_index_groups, "sum_dtype": sum_dtype}
    Options.from_layer(Options(weighting=weighting, running_var=running_var, **given))
    obstacles: dict[str, str] = {}
    layers = [(p, m) for p, m in nnx.iter_modules(model) if isinstance(m, nnx.BatchNorm)]
    for path, layer in layers:
        if type(layer) in (nnx.BatchNorm, BatchNorm):
            layer.__class__ = BatchNorm
            layer.weighting, layer.running_var, layer.sum_dtype = weighting, running_var, sum_dtype
            if axis_name is not None:
                layer.axis_name, layer.axis_index_groups = axis_name, axis_index_groups
            elif axis_index_groups is not None:
                layer.axis_index_groups = axis_index_groups
        else:
            why = f"the class {type(layer).__qualname__} is a subclass of flax.nnx.BatchNorm"
            obstacles[".".join(map(str, path))] = why
    if obstacles:
        warn(list_obstacles(obstacles, "layer(s) are not converted"))
    elif not layers:
        warn("`model` has no flax.nnx.BatchNorm: nothing to convert. Pass a model with one.")
    return model


def revert_batch_norm(model: _Model) -> _Model:
    """Replace every `BatchNorm` of a model by flax.nnx.BatchNorm, in place; return `model`.

    State and flax's options, including `axis_name`, are kept.

    Examples
    --------
    >>> from flax import nnx
    >>> from multibn.flax import BatchNorm, revert_batch_norm
    >>> model = nnx.Sequential(BatchNorm(2, rngs=nnx.Rngs(0)))
    >>> type(revert_batch_norm(model).layers[0]) is nnx.BatchNorm
    True
    """
    for _, layer in nnx.iter_modules(model):
        if type(layer) is BatchNorm:
            for name in ("weighting", "running_var", "sum_dtype"):
                delattr(layer, name)
            layer.__class__ = nnx.BatchNorm
    return model
