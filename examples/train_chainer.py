"""Train in Chainer over MPI, with ChainerMN.

mpiexec -n 2 python -m mpi4py examples/train_chainer.py --norm sync
"""

# isort: off
from multibn.chainer import create_mnbn_model  # before Chainer: makes it importable

# isort: on
import chainer
import chainermn
import digits
import numpy as np
from chainer import functions as F
from common import LEARNING_RATE, MOMENTUM, parse_args, write_line
from resnet_chainer import ResNet, accuracy


def main() -> None:
    args = parse_args(__doc__)
    chainer.global_config.dtype = np.dtype(args.dtype)
    comm = chainermn.create_communicator("naive")
    train, test = digits.load(args.dtype)

    model = ResNet()
    if args.norm == "sync":
        model = create_mnbn_model(model, comm)
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.MomentumSGD(lr=LEARNING_RATE, momentum=MOMENTUM), comm
    )
    optimizer.setup(model)
    optimizer.update()  # the first update of a multi-node optimizer only broadcasts the parameters

    for step, part in enumerate(digits.batches(args.steps, comm.rank, comm.size)):
        loss = F.softmax_cross_entropy(model(train.x[part]), train.y[part])
        model.cleargrads()
        loss.backward()
        optimizer.update()

        mean_loss = comm.allreduce_obj(float(loss.array)) / comm.size
        if comm.rank == 0:
            write_line(args.output, step=step, loss=mean_loss)

    if comm.rank == 0:
        write_line(args.output, accuracy=accuracy(model, *test))


if __name__ == "__main__":
    main()
