"""The devices along an axis of a mesh: what a communicator is to processes."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax import lax

from multibn._typing import Array

AxisName: TypeAlias = Any  # a string, or several; whatever is hashable
Groups: TypeAlias = Sequence[Sequence[int]] | None


class MeshAxis:
    """The devices along the axis `name` of a mesh, or those of one of its `groups`.

    Raises ValueError, which names the parameter, unless the axis is bound where JAX traces.
    """

    rank = 0  # one program runs on all devices, and does not know where

    def __init__(self, name: AxisName, groups: Groups) -> None:
        self.name, self.groups = name, groups
        try:
            length = lax.axis_size(name)
        except NameError as error:
            bound = sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))
            raise ValueError(
                "`axis_name` must be an axis that jax.shard_map, jax.pmap or jax.vmap binds around "
                f"the call: got {name!r}, and {bound or 'none'} is bound. Under jax.jit alone, "
                "leave `axis_name` out: a program over sharded arrays is that of one process."
            ) from error
        members = sorted(i for group in groups or () for i in group)
        if groups is not None and members != [*range(length)]:
            raise ValueError(
                f"`axis_index_groups` must have each of the {length} indices of the axis {name!r} "
                f"once: got {groups}."
            )
        self.size = length if groups is None else len(groups[0])

    def allreduce(self, x: Array, /) -> Array:
        """Sum `x` over the devices."""
        try:
            return lax.psum(x, self.name, axis_index_groups=self.groups)
        except NotImplementedError as error:
            raise ValueError(
                f"`axis_index_groups` needs jax.shard_map(..., check_vma=False), or jax.pmap: got "
                f"{self.groups} where JAX tells varying values from others."
            ) from error


def spread(summed: Array, x: Array, name: AxisName) -> Array:
    """A sum over devices as an array of each device, if `x` is one.

    The gradients of all that is computed from the array are then summed in one message.
    """
    varying = getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", ())
    names = name if isinstance(name, tuple) else (name,)
    own = tuple(each for each in names if each in varying)
    return lax.pcast(summed, own, to="varying") if own else summed
