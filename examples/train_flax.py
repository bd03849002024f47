"""Train in JAX with flax, on the devices of one process.

JAX_NUM_CPU_DEVICES=2 python examples/train_flax.py --norm sync
"""

from functools import partial
from typing import Any

import digits
import jax
import jax.numpy as jnp
import optax
from common import LEARNING_RATE, MOMENTUM, parse_args, write_line
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from resnet_flax import ResNet, accuracy

from multibn.flax import convert_batch_norm


def main() -> None:
    args = parse_args(__doc__)
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    train, test = digits.load(args.dtype)

    model = ResNet(jnp.dtype(args.dtype))
    if args.norm == "sync":
        convert_batch_norm(model, "data", running_var="unbiased_global")
    optimizer = nnx.Optimizer(model, optax.sgd(LEARNING_RATE, MOMENTUM), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
    def step(state: Any, x: Any, y: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)

        def loss(model: nnx.Module) -> Any:
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return jax.lax.pmean(losses.mean(), "data")

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        if args.norm == "plain":  # each device has updated its own running statistics
            statistics = nnx.state(model, nnx.BatchStat)
            nnx.update(model, jax.tree.map(lambda v: jax.lax.pmean(v, "data"), statistics))
        return nnx.state((model, optimizer)), value

    for number, part in enumerate(digits.batches(args.steps, 0, 1)):
        state, value = step(state, train.x[part], train.y[part])
        write_line(args.output, step=number, loss=float(value))

    nnx.update((model, optimizer), state)
    write_line(args.output, accuracy=accuracy(model, *test))


if __name__ == "__main__":
    main()
