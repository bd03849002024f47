"""What the result of a module depends on besides its inputs, kept from a first pass to the next."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from multibn.torch_backend.checkpointing import checkpoint_contexts
from multibn.torch_backend.modules import Synchronized

_NORMS = (_NormBase, Synchronized)


class Ambient:
    """Random numbers, autocast, training flags and batch statistics of one pass of a module.

    `recording` is entered once and around the first pass; `replaying` around each that follows. The
    user's random number generators are read and put back, never seeded. `name` is what errors call
    the module, `parts` are the module and all modules in it, `device` is that of its inputs.

    `recording` raises RuntimeError if the module has changed its own buffers, batch norms excepted;
    `replaying` does if parameters or buffers are no longer what they were.
    """

    def __init__(self, name: str, parts: Sequence[nn.Module], device: torch.device) -> None:
        self._name, self._parts = name, parts
        self._training = [part.training for part in parts]
        self._read = [(t, t._version) for t in _read_by(parts)]
        self._device = None if device.type in ("cpu", "meta") else device
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(["cpu", device.type])
            if torch.amp.is_autocast_available(kind)
        ]
        self._first, self._again = checkpoint_contexts()
        self._rng: list[Tensor] | None = None

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Context of the first pass."""
        before = self._rng_states()
        with self._first, self._autocasting():
            yield
        if not all(map(torch.equal, before, self._rng_states())):
            self._rng = before  # else nothing was drawn, and nothing has to be put back
        changed = self._changed()
        if changed is not None:
            raise RuntimeError(
                f"{self._name} changes its own `{changed}` when it is called, and would find "
                'another value there when it runs again. Use `mode="stored"`.'
            )

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Context of a pass that runs again."""
        changed = self._changed()
        if changed is not None:
            raise RuntimeError(
                f"`{changed}` of {self._name} has been modified since the forward pass, which "
                "would have to run again with its old value. Call backward before what modifies "
                "it: an optimizer's step, or, for a buffer, DistributedDataParallel's next forward "
                "pass unless `broadcast_buffers=False`."
            )
        with self._again, self._training_flags(), self._random_numbers(), self._autocasting():
            yield

    def _changed(self) -> str | None:
        changed = next((t for t, version in self._read if t._version != version), None)
        if changed is None:
            return None
        module = self._parts[0]
        named = chain(module.named_parameters(), module.named_buffers())
        return next((label for label, t in named if t is changed), "a tensor")

    def _rng_states(self) -> list[Tensor]:
        """Of the CPU's generator and, if the inputs are elsewhere, of that device's."""
        if self._device is None:
            return [torch.get_rng_state()]
        accelerator = torch.get_device_module(self._device)
        return [torch.get_rng_state(), accelerator.get_rng_state(self._device)]

    @contextlib.contextmanager
    def _random_numbers(self) -> Iterator[None]:
        if self._rng is None:
            yield
            return
        if self._device is None:
            with torch.random.fork_rng([]):
                torch.set_rng_state(*self._rng)
                yield
            return
        with torch.random.fork_rng([self._device.index], device_type=self._device.type):
            torch.set_rng_state(self._rng[0])
            torch.get_device_module(self._device).set_rng_state(self._rng[1], self._device)
            yield

    @contextlib.contextmanager
    def _autocasting(self) -> Iterator[None]:
        # Without the cache, which would keep the cast weights of all blocks until the user's
        # autocast ends, and on some versions of torch hand one that was cast without a gradient to
        # whoever uses the weight next.
        with contextlib.ExitStack() as stack:
            for kind, enabled, dtype in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype, enabled, cache_enabled=False))
            yield

    @contextlib.contextmanager
    def _training_flags(self) -> Iterator[None]:
        flags = zip(self._parts, self._training, strict=True)
        changed = [part for part, training in flags if part.training != training]
        try:
            for part in changed:
                part.training = not part.training
            yield
        finally:
            for part in changed:
                part.training = not part.training


def _read_by(parts: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers that must keep their values; norms in training write theirs."""
    written = {
        id(buffer)
        for part in parts
        if part.training and isinstance(part, _NORMS)
        for buffer in part.buffers()
    }
    for part in parts:
        for t in chain(part._parameters.values(), part._buffers.values()):
            if t is not None and id(t) not in written:
                yield t
