"""Normalization with the statistics of all observations so far, on all ranks."""

from typing import Any

import torch
from torch import Tensor, nn

from multibn._typing import check_eps, check_ints, check_number
from multibn.communicators import CommunicatorLike, as_communicator
from multibn.engine import masks, running
from multibn.kernels import NormArgs, reference
from multibn.torch_backend._torch_private import not_compiled


class RunningNorm(nn.Module):
    """Normalization with the statistics of all observations: `update`, then `synchronize`.

    Each observation counts once, whichever rank has it. The buffers `mean`, `var` (biased) and
    `count` are always float64. Only `synchronize` changes them; they are equal on all ranks, bit
    for bit. State dicts load on any number of ranks, and lack observations after `synchronize`.

    Parameters
    ----------
    shape, eps, clip, process_group
        Shape of one observation, an int or a tuple; added to the variance; the largest absolute
        value of an output, or None; the ranks, anything that `multibn.as_communicator` takes.

    Examples
    --------
    >>> import torch
    >>> from multibn.torch import RunningNorm
    >>> norm = RunningNorm(2)
    >>> norm.update(torch.tensor([[1.0, 10.0], [3.0, 30.0]]))  # of this rank
    >>> norm.synchronize()  # collective
    >>> norm(torch.tensor([1.0, 30.0])), norm.inverse(torch.zeros(2))
    (tensor([-1.,  1.]), tensor([ 2., 20.]))
    """

    def __init__(
        self,
        shape: int | tuple[int, ...],
        eps: float = 1e-8,
        clip: float | None = None,
        process_group: CommunicatorLike = None,
    ) -> None:
        super().__init__()
        self.shape = shape if isinstance(shape, tuple) else (shape,)
        check_ints("shape", self.shape)
        check_eps(eps)
        check_number("clip", clip, "(0, inf)", none="any output")
        self.eps, self.clip, self.process_group = eps, clip, as_communicator(process_group)
        zeros = torch.zeros(self.shape, dtype=torch.float64, device=None)
        for name, value in (("mean", zeros), ("var", zeros + 1), ("count", zeros.new_zeros(()))):
            self.register_buffer(name, value)
        self.freeze(False)

    def freeze(self, frozen: bool = True) -> None:
        """Drop observations since `synchronize` and ignore new ones on this rank, or end this."""
        self.frozen, self._new = frozen, (0.0, 0.0, 0.0)  # mean, variance and count

    @not_compiled
    @torch.no_grad()
    def update(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Add observations `(*batch, *shape)`; if `mask` is given, `(*batch)`, those where True."""
        x = self._wide(x).reshape(-1, *self.shape)
        where = None if mask is None else masks.as_mask(x, mask.reshape(-1), None, axis=(0,))
        args = NormArgs(x, None, None, 0.0, (0,), mask=where)
        _, count = masks.weigh(args, "element")
        if not self.frozen:
            self._new = running.merge(self._new, (*reference.local_moments(args, count), count))

    @not_compiled
    @torch.no_grad()
    def synchronize(self) -> None:
        """Merge all ranks' new observations. Collective: one allreduce, two if `count` is 0.

        Raises RuntimeError on all ranks if their shapes, options or counts differ, and
        FloatingPointError if one rank has NaN or infinity. The new observations are dropped then.
        """
        old = [*self.buffers()]
        new = [torch.as_tensor(v).to(b).expand_as(b) for v, b in zip(self._new, old, strict=True)]
        self.freeze(self.frozen)
        place = f"{self}.synchronize() with count={float(old[2]):g}"
        of_all = running.merge_over_ranks(old, new, self.process_group, place)
        for buffer, value in zip(old, of_all, strict=True):
            buffer.copy_(value)

    def normalize(self, x: Tensor) -> Tensor:
        """Return `(x - mean) / sqrt(var + eps)`, clipped. Not collective; also a call does this."""
        mean, var, _ = self.buffers()
        y = (self._wide(x) - mean) * (var + self.eps).rsqrt()
        y = y if self.clip is None else y.clamp(-self.clip, self.clip)
        return y.to(x.dtype if x.is_floating_point() else torch.float32)

    forward = normalize

    def inverse(self, y: Tensor) -> Tensor:
        """Return `y * sqrt(var + eps) + mean`, the observations unless `clip` has changed `y`."""
        mean, var, _ = self.buffers()
        return (self._wide(y) * (var + self.eps).sqrt() + mean).to(y.dtype)

    def extra_repr(self) -> str:
        return f"{self.shape}, eps={self.eps}, clip={self.clip}"

    def _wide(self, x: Any) -> Tensor:
        got, k = tuple(getattr(x, "shape", ())), len(self.shape)
        if not isinstance(x, Tensor) or len(got) < k or got[len(got) - k :] != self.shape:
            kind = f"{type(x).__qualname__} of shape {got}"
            raise ValueError(f"`x` must be a tensor of shape (*batch, *{self.shape}): got {kind}.")
        return x.double()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        def moved(t: Tensor) -> Tensor:  # norm.half() must keep float64
            return new if (new := fn(t)).dtype == t.dtype else t.to(new.device)

        return super()._apply(moved, recurse)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.freeze(self.frozen)  # drop observations of the old statistics
        super()._load_from_state_dict(*arguments)
