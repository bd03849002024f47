"""Train in torch: DistributedDataParallel under torchrun, or MPI without torch.distributed.

torchrun --nproc-per-node 2 examples/train_torch.py --norm sync
mpiexec -n 2 python -m mpi4py examples/train_torch.py --norm sync
"""

import digits
import torch
import torch.distributed as dist
from common import LEARNING_RATE, MOMENTUM, parse_args, write_line
from resnet_torch import ResNet, accuracy
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from multibn import as_communicator
from multibn.torch import average_gradients, convert_sync_batchnorm


def main() -> None:
    args = parse_args(__doc__)
    torch.set_default_dtype(getattr(torch, args.dtype))
    under_torchrun = dist.is_torchelastic_launched()
    if under_torchrun:
        dist.init_process_group("gloo")
        comm = as_communicator()
    else:
        from mpi4py import MPI

        comm = as_communicator(MPI.COMM_WORLD)
    train, test = (
        [torch.from_numpy(a) for a in images_and_labels]
        for images_and_labels in digits.load(args.dtype)
    )

    model = ResNet()
    if args.norm == "sync":
        convert_sync_batchnorm(model, comm)
    parallel = DistributedDataParallel(model) if under_torchrun else model
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    for step, part in enumerate(digits.batches(args.steps, comm.rank, comm.size)):
        loss = F.cross_entropy(parallel(train[0][part]), train[1][part])
        optimizer.zero_grad()
        loss.backward()
        if not under_torchrun:
            average_gradients(model, comm)
        optimizer.step()

        mean_loss = comm.allreduce(loss.detach()) / comm.size
        if comm.rank == 0:
            write_line(args.output, step=step, loss=mean_loss.item())

    if comm.rank == 0:
        write_line(args.output, accuracy=accuracy(model, *test))
    if under_torchrun:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
