"""One update of moving averages for all forward passes of a step."""

from collections.abc import Iterator
from contextlib import contextmanager

import chainer

from multibn.chainer_backend.links import MultiNodeBatchNormalization, check_link, step_accumulators
from multibn.engine.running import update_running


@contextmanager
def step_statistics(model: chainer.Link) -> Iterator[None]:
    """Update the moving averages of `model` once for all forward passes in this context.

    Works like `multibn.torch.step_statistics`. A link's `N` increases by 1 if its last call had
    `finetune=True`. Not collective.

    Parameters
    ----------
    model
        A chain with multi-node links, or one such link.

    Raises
    ------
    ValueError
        If `model` has no multi-node link.

    Examples
    --------
    >>> import numpy as np
    >>> from multibn.chainer import MultiNodeBatchNormalization, step_statistics
    >>> link = MultiNodeBatchNormalization(1, None, decay=0.0)
    >>> with step_statistics(link):
    ...     for x in np.asarray([[[1.0], [3.0]], [[5.0], [7.0]]], "f"):
    ...         y = link(x)
    >>> print(link.avg_mean)
    [4.]
    """
    check_link("model", model)
    links = [link for link in model.links() if isinstance(link, MultiNodeBatchNormalization)]
    if not links:
        raise ValueError(
            "`model` must have a multi-node link: got none in "
            f"{type(model).__qualname__}. Convert the model with create_mnbn_model."
        )
    entered = [link for link in links if link not in step_accumulators]
    step_accumulators.update(dict.fromkeys(entered))
    try:
        yield
    finally:
        accumulators = [(link, step_accumulators.pop(link)) for link in entered]
    for link, accumulator in accumulators:
        if accumulator is not None:
            # Look up the arrays again: they may have been replaced.
            running = accumulator.running._replace(mean=link.avg_mean, var=link.avg_var)
            update_running(running, *accumulator.compute())
            link.store_count(running)
