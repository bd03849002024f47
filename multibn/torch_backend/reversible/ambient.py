"""The state that a module's result depends on besides its inputs, restored for a second pass."""

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from multibn.torch_backend.layer.synchronized import Synchronized
from multibn.torch_backend.train.checkpointing import checkpoint_contexts

_NORMS = (_NormBase, Synchronized)


class Ambient:
    """Random numbers, autocast, training flags and batch statistics of one pass of a module.

    Enter `recording` around the first pass, and `replaying` around each later pass. They read and
    restore the states of the user's random number generators and never seed them. Errors call the
    module `name`; `parts` are the module and all modules in it, `device` is that of its inputs.

    `recording` raises RuntimeError if the module has changed its own buffers (batch norms may);
    `replaying` raises it if parameters or buffers have changed since the first pass.
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
        before = self._rng_states()
        with self._first, self._autocasting():
            yield
        if not all(map(torch.equal, before, self._rng_states())):
            self._rng = before  # None if the pass draws nothing: no state to restore
        changed = self._changed()
        if changed is not None:
            raise RuntimeError(
                f"{self._name} changes its own `{changed}` when it is called, and would find "
                'another value there when it runs again. Use `mode="stored"`.'
            )

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
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
        """States of the CPU's generator and of the inputs' device, if this is another."""
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
        # Autocast's cache would hold the cast weights of all blocks until the user's autocast ends,
        # and some versions of torch reuse a weight that was cast without a gradient where a later
        # operation needs the gradient.
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
    """Parameters and buffers that must not change: all but those that norms in training write."""
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
