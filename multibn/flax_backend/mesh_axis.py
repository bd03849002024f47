"""The devices along a mesh axis, with the interface of a communicator."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
from jax import lax

from multibn._typing import Array

AxisName: TypeAlias = Any  # any hashable, usually a string; or a tuple of them
Groups: TypeAlias = Sequence[Sequence[int]] | None


class MeshAxis:
    """The devices along the mesh axis `name`, or one of the `groups` of these devices.

    Raises ValueError unless the axis is bound while JAX traces.
    """

    rank = 0  # all devices run the same program, and have no ranks

    def __init__(self, name: AxisName, groups: Groups) -> None:
        self.name, self.groups = name, groups
        try:
            length = lax.axis_size(name)
        except NameError as error:
            bound = sorted(map(str, jax.sharding.get_abstract_mesh().manual_axes))
            raise ValueError(
                "`axis_name` must be an axis that jax.shard_map, jax.pmap or jax.vmap binds around "
                f"the call: got {name!r}, and {bound or 'none'} is bound. Under jax.jit alone, "
                "leave `axis_name` out: statistics then cover the whole sharded array."
            ) from error
        members = sorted(i for group in groups or () for i in group)
        if groups is not None and members != [*range(length)]:
            raise ValueError(
                f"`axis_index_groups` must have each of the {length} indices of the axis {name!r} "
                f"exactly once: got {groups}."
            )
        self.size = length if groups is None else min(map(len, groups))

    def allreduce(self, x: Array, /) -> Array:
        """Sum `x` over the devices."""
        try:
            return lax.psum(x, self.name, axis_index_groups=self.groups)
        except NotImplementedError as error:
            raise ValueError(
                f"`axis_index_groups` needs jax.shard_map(..., check_vma=False) or jax.pmap: got "
                f"{self.groups} under jax.shard_map(..., check_vma=True)."
            ) from error


def spread(summed: Array, x: Array, name: AxisName) -> Array:
    """Return a sum over devices as an array that varies over devices, if `x` varies.

    The gradients of everything that is computed from the array are then summed in one psum.
    """
    varying = getattr(getattr(jax.typeof(x), "manual_axis_type", None), "varying", ())
    names = name if isinstance(name, tuple) else (name,)
    varying_names = tuple(name for name in names if name in varying)
    return lax.pcast(summed, varying_names, to="varying") if varying_names else summed
