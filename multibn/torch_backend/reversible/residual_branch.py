"""One residual branch (F or G) of a reversible block."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from multibn.torch_backend.layer.base import SyncNormBase, replaced, running_tensors
from multibn.torch_backend.train.checkpointing import checkpoint_contexts

_NORMS = (_NormBase, SyncNormBase)


def dtype_or_type_name(x: Any) -> Any:
    """Return the dtype of a tensor, or the type's name of anything else, for messages."""
    return x.dtype if isinstance(x, Tensor) else type(x).__qualname__


@dataclass(eq=False)
class ResidualBranch:
    """F or G of one block in one call.

    `target` is the index of the stream to which the result is added, `input_dtype` the dtype of
    the module's input; `scale` multiplies each sample's result (stochastic depth).

    If the backward pass will recompute the branch, run its first pass inside `recording` and every
    recomputation inside `replaying`: random numbers, autocast, training flags and batch statistics
    are then those of the first pass. Random numbers are those of the default generators of the CPU
    and of the input's device: their states are saved and restored, never seeded.
    """

    block: int
    target: int
    module: nn.Module
    input_dtype: torch.dtype
    scale: Tensor | None

    @cached_property
    def _parts(self) -> list[nn.Module]:
        return list(self.module.modules())

    @cached_property
    def parameters(self) -> list[Tensor]:
        """Parameters of the module, each once."""
        found = (p for part in self._parts for p in part._parameters.values() if p is not None)
        return list({id(p): p for p in found}.values())

    def __str__(self) -> str:
        return f"{'FG'[self.target]} of block {self.block}"

    def __call__(self, stream: Tensor, x: Tensor, cond: Sequence[Any]) -> Tensor:
        """Return what is added to `stream`, computed from `x`."""
        added: Any = self.module(x.to(self.input_dtype), *cond)
        if not (isinstance(added, Tensor) and added.is_floating_point()):
            raise TypeError(
                f"{self} must return a single floating-point tensor, which is added to stream "
                f"{self.target + 1}: got {dtype_or_type_name(added)}. Wrap the module so that it "
                "returns only that tensor."
            )
        if added.shape != stream.shape:
            raise ValueError(
                f"{self} must return the shape of stream {self.target + 1}, {tuple(stream.shape)}: "
                f"got {tuple(added.shape)}."
            )
        added = added.to(stream.dtype)
        return added if self.scale is None else added * self.scale

    @contextlib.contextmanager
    def recording(self, inputs: Sequence[Tensor]) -> Iterator[None]:
        """Context for the first pass, which reads the tensors `inputs`.

        Raises RuntimeError if the module modifies in place `inputs`, a parameter, or a buffer that
        is not a training norm's. Also raises RuntimeError if FSDP wraps the module itself: in a
        recomputation, FSDP's hooks would replace the parameters of the first pass.
        """
        fsdp: Any = sys.modules.get("torch.distributed.fsdp")
        kinds = (fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()
        if any(isinstance(part, kinds) for part in self._parts):
            raise RuntimeError(
                f"{self} is sharded by FSDP separately, so it cannot be recomputed with the "
                "gathered parameters. Call `fully_shard` on the whole ReversibleSequence, or split "
                'it into several shorter sequences and shard each, or use `mode="stored"`.'
            )
        device = inputs[0].device
        self._device = None if device.type in ("cpu", "meta") else device
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in filter(torch.amp.is_autocast_available, {"cpu", device.type})
        ]
        self._training = [part.training for part in self._parts]
        self._constants = [(*place, place[-1]._version) for place in _constants_of(self._parts)]
        first, self._replay = checkpoint_contexts()
        versions = [t._version for t in inputs]
        before = self._rng_states()
        with first, self._autocasting():
            yield
        # None if the pass draws nothing: no state to restore.
        self._rng = None if all(map(torch.equal, before, self._rng_states())) else before
        if (changed := self._changed()) is not None:
            raise RuntimeError(
                f"{self} modifies `{changed}` in its forward pass, so recomputing it would give a "
                'different result. Use `mode="stored"`.'
            )
        if [t._version for t in inputs] != versions:
            raise RuntimeError(
                f"{self} modifies its input in place, so it cannot be recomputed. Clone the input "
                "or use an out-of-place operation."
            )

    @contextlib.contextmanager
    def replaying(self, parameters: Sequence[Tensor] = ()) -> Iterator[None]:
        """Context for a recomputation, which reads the parameters and buffers of the first pass.

        If `parameters` is given, these tensors replace `self.parameters`, in the same order.
        Raises RuntimeError if a parameter or buffer was modified in place since the first pass.
        """
        if (changed := self._changed()) is not None:
            raise RuntimeError(
                f"`{changed}` of {self} was modified after the forward pass, so its activations "
                "cannot be recomputed. Call backward() before the optimizer step or other "
                "modification. If it is a buffer, DistributedDataParallel may have overwritten it "
                "in its next forward pass: call backward() before that pass, or set "
                "`broadcast_buffers=False`."
            )
        flags = zip(self._parts, self._training, strict=True)
        places: list[tuple[Any, str, Any]] = [(vars(part), "training", v) for part, v in flags]
        others = dict(zip(map(id, self.parameters), parameters, strict=True)) if parameters else {}
        # torch.func.functional_call would take much more time.
        places += [
            (values, name, others.get(id(t), t))
            for values, name, t, _ in self._constants
            if id(t) in others or values[name] is not t  # assigned since the first pass
        ]
        with self._replay, replaced(places), self._random_numbers(), self._autocasting():
            yield

    def _changed(self) -> str | None:
        """Return the name of a tensor that was modified in place since the first pass, or None."""
        for _, name, changed, version in self._constants:
            if changed._version != version:
                named = chain(self.module.named_parameters(), self.module.named_buffers())
                return next((label for label, t in named if t is changed), name)
        return None

    def _rng_states(self) -> list[Tensor]:
        """Return the states of the default generators: the CPU's and that of the inputs' device."""
        if self._device is None:
            return [torch.get_rng_state()]
        accelerator = torch.get_device_module(self._device)
        return [torch.get_rng_state(), accelerator.get_rng_state(self._device)]

    @contextlib.contextmanager
    def _random_numbers(self) -> Iterator[None]:
        if self._rng is None:
            yield
            return
        device = self._device
        forked = [] if device is None else [device.index]
        with torch.random.fork_rng(forked, device_type=device.type if device else "cuda"):
            torch.set_rng_state(self._rng[0])
            if device is not None:
                torch.get_device_module(device).set_rng_state(self._rng[1], device)
            yield

    @contextlib.contextmanager
    def _autocasting(self) -> Iterator[None]:
        # Without a cache: autocast's cache would hold the cast weights of all blocks until the
        # user's autocast ends. Some versions of torch also return a cached weight that was cast
        # without a gradient to an operation that needs the gradient.
        with contextlib.ExitStack() as stack:
            for kind, dtype, enabled in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield


def _constants_of(parts: Sequence[nn.Module]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield parameters and buffers that must not change: all that training norms do not write."""
    written = {
        id(buffer)
        for part in parts
        if part.training and isinstance(part, _NORMS)
        for buffer in (*part.buffers(), *running_tensors(part))
    }
    for part in parts:
        for values in (part._parameters, part._buffers):
            for name, t in values.items():
                if t is not None and id(t) not in written:
                    yield values, name, t
