"""Train in torch over MPI, without torch.distributed.

mpiexec -n 2 python -m mpi4py examples/train_torch_mpi.py --norm sync
"""

import digits
import torch
from common import LEARNING_RATE, MOMENTUM, parse_args, write_line
from mpi4py import MPI
from resnet_torch import ResNet, accuracy
from torch.nn import functional as F

from multibn.torch_backend import average_gradients, convert_sync_batchnorm


def main() -> None:
    args = parse_args(__doc__)
    torch.set_default_dtype(getattr(torch, args.dtype))
    comm = MPI.COMM_WORLD
    train, test = (
        [torch.from_numpy(a) for a in images_and_labels]
        for images_and_labels in digits.load(args.dtype)
    )

    model = ResNet()
    if args.norm == "sync":
        convert_sync_batchnorm(model, comm)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    for step, part in enumerate(digits.batches(args.steps, comm.rank, comm.size)):
        loss = F.cross_entropy(model(train[0][part]), train[1][part])
        optimizer.zero_grad()
        loss.backward()
        average_gradients(model, comm)
        optimizer.step()

        mean_loss = comm.allreduce(loss.item()) / comm.size
        if comm.rank == 0:
            write_line(args.output, step=step, loss=mean_loss)

    if comm.rank == 0:
        write_line(args.output, accuracy=accuracy(model, *test))


if __name__ == "__main__":
    main()
