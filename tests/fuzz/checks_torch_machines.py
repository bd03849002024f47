"""State machines of torch's layers: right programs in random order, see `machines`."""

import copy
import os
import traceback
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from multibn import SingleProcess
from multibn import torch_backend as tb
from multibn.communicators import Communicator
from tests.fuzz import machines
from tests.fuzz.machines import Batches, Expected, run_machines, shape, strided
from tests.fuzz.oracle import F64, Buffers, Norm, Oracle
from tests.fuzz.torch_machine import TorchTraining
from tests.harness.runs import on

RUNS = on("torchrun", 2, 3, needs="torch")


class TorchMachine(TorchTraining):
    OPERATIONS = TorchTraining.OPERATIONS | {
        **{"modes": 3, "load": 3, "to": 2, "buffers": 2, "tracking": 2, "revert": 2},
        **{"parametrized": 1, "function": 2, "average": 2, "fork": 1, "workers": 0.3},
        **{"population": 2, "sync_running": 1, "compiled": 0.5},
    }

    def op_modes(self) -> None:
        for layer in self.layers:
            layer.train(self.odds(0.8))
            if layer.training and hasattr(layer, "split_bn"):
                layer.split_bn.train(self.odds(0.8))

    def set_option(self, layer: Any, name: str, value: Any) -> None:
        if layer._num_splits > 1 and name in ("weighting", "fuse_relu"):
            return  # which parts of one rank do not have
        is_split = hasattr(layer, "split_bn") and name in ("eps", "momentum")
        for part in [layer.bn, layer.split_bn] if is_split else [layer]:
            setattr(part, name, value)

    def op_load(self) -> None:
        way, state = self.pick("same", "assign", "fresh", "other dtype"), self.chain.state_dict()
        self.log("  ", way)
        want = self.buffers[self.rank]
        if way == "other dtype":
            state = {k: v.float() if v.is_floating_point() else v for k, v in state.items()}
            want = [{k: v.float().double() for k, v in of.items()} for of in want]
        else:
            state = copy.deepcopy(state)
        if way == "fresh":
            self.chain = copy.deepcopy(self.chain)
            for t in (*self.chain.parameters(), *self.chain.buffers()):
                t.detach().zero_()
        self.chain.load_state_dict(state, assign=way == "assign")
        self.compare_buffers(want)

    def op_to(self) -> None:
        layer = self.pick(self.chain, *self.layers)
        layer.to(self.pick(torch.float32, F64, F64))

    def set_parameter(self, layer: Any, name: str, value: Tensor | None, way: str = "") -> None:
        p = getattr(layer, name)
        if value is None or p is None:
            setattr(layer, name, None if value is None else nn.Parameter(value))
            return
        new = value.to(p.dtype)
        if way == "data":
            p.data = new
        elif way == "view":
            setattr(layer, name, nn.Parameter(torch.from_numpy(strided(new.numpy()))))
        else:
            getattr(p.data, way)(new)

    def op_buffers(self) -> None:
        _, layer = self.some_layer()
        way = self.pick("register", "strided", "fill_", "assign")
        part = self.pick(layer.bn, layer.split_bn) if hasattr(layer, "split_bn") else layer
        self.log("  ", way)
        for name in ("running_mean", "running_var"):
            if (old := getattr(part, name)) is None:
                continue
            new = (self.normal(len(old)) ** 2 + 0.5).to(old.dtype)
            new = torch.from_numpy(strided(new.numpy())) if way == "strided" else new
            if way == "fill_":
                old.fill_(new[0])
            elif way == "assign":
                setattr(part, name, new)
            else:
                part.register_buffer(name, new)

    def op_tracking(self) -> None:
        _, layer = self.some_layer()
        if hasattr(layer, "split_bn"):
            return
        on = layer.track_running_stats = not layer.track_running_stats
        removed = not on and self.odds(0.5)
        values = torch.zeros(self.C).double(), torch.ones(self.C).double(), torch.tensor(0)
        names = "running_mean", "running_var", "num_batches_tracked"
        for name, value in zip(names, values, strict=True):
            if removed or getattr(layer, name) is None:
                layer.register_buffer(name, value if on else None)

    def op_revert(self) -> None:
        n, layer = self.some_layer()
        if hasattr(layer, "split_bn") or layer.fuse_relu:
            return
        splits, convention = layer._num_splits, layer.running_var_convention
        own = {"weighting": layer.weighting, "running_var": convention}
        assert not isinstance(tb.revert_sync_batchnorm(layer), tb.SyncBatchNorm)
        if splits > 1:
            tb.convert_sub_batchnorm(layer, splits)
        else:
            tb.convert_sync_batchnorm(layer, self.handles[self.groups[n]], **own)
        self.compare_buffers()

    def op_function(self) -> None:
        group, dtype = self.pick(*self.handles), self.pick("float64", "float32")
        norm = Norm(self.partitions[group], self.pick(1e-5, 0.1), 0.1, tracked=False)
        norm.weighting = self.pick(*machines.WEIGHTINGS)
        kind = getattr(torch, dtype)
        wb = [self.normal(self.C).to(kind).double() if self.odds(0.7) else None for _ in (0, 1)]

        def expected(b: Batches) -> Expected:
            oracle = Oracle([norm], [wb], [[{}]] * self.size, disturbed=b.disturbed)
            xs = [x.clone().requires_grad_() for x in b.xs]
            ys = oracle.call(0, xs, b.masks)
            loss: Any = sum((y * dy).sum() for y, dy in zip(ys, b.dys, strict=True))
            loss.backward()
            leaves = oracle.leaves[self.rank][0]
            own = {str(k): p.grad for k, p in enumerate(leaves) if p is not None}
            return {"y": ys[self.rank], "dx": xs[self.rank].grad, **own}

        draw = partial(self.batches, dtype, (0, 1, 2, 5), masked=self.odds(0.3))
        b, want, moved = self.until_accepted(draw, expected)
        leaves = [None if p is None else p.to(kind).requires_grad_() for p in wb]
        x = self.tensor(b.xs[self.rank], dtype).requires_grad_()
        y, _ = tb.sync_batch_norm(
            x, *leaves, process_group=self.handles[group], eps=norm.eps,
            weighting=norm.weighting,  # type: ignore[arg-type]
            mask=b.masks[self.rank] if b.masked else None,
        )  # fmt: skip
        y.backward(self.tensor(b.dys[self.rank], dtype))
        found = {"y": y, "dx": x.grad}
        found |= {str(k): p.grad for k, p in enumerate(leaves) if p is not None}
        self.compare(found, want, moved, dtype)

    def op_average(self) -> None:
        """An optimizer's step by the mean of the gradients."""
        parameters = [*self.chain.parameters()]
        if not parameters:
            return
        grads = [[self.normal(*p.shape).to(p.dtype) for p in parameters] for _ in range(self.size)]
        for p, g in zip(parameters, grads[self.rank], strict=True):
            p.grad = g if p.requires_grad_() is p else None
        means = [sum(of_p).double() / self.size for of_p in zip(*grads, strict=True)]
        want: Expected = {
            str(k): p.detach().double() - 0.1 * mean
            for k, (p, mean) in enumerate(zip(parameters, means, strict=True))
        }
        tb.average_gradients(parameters, self.world)
        torch.optim.SGD(parameters, lr=0.1).step()
        found = {str(k): p for k, p in enumerate(parameters)}
        self.compare(found, want, want, "float32")
        for p in parameters:  # bit for bit the same on all ranks, as the oracle's
            p.data.copy_(self.world.allreduce(p.detach()) / self.size)

    def op_fork(self) -> None:
        child = os.fork()
        if child == 0:
            try:
                layer = tb.SyncBatchNorm(2, process_group=SingleProcess())
                layer(torch.rand(3, 2, requires_grad=True)).sum().backward()
                for n, of in enumerate(self.layers):
                    of.eval()(torch.rand(shape(self.chain.dims[n], 3, self.C, 4)))
                os._exit(0)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0

    def op_workers(self) -> None:
        numbers: Any = torch.arange(4)
        loader = DataLoader(numbers, batch_size=2, num_workers=1)
        assert torch.equal(torch.cat([*loader]), numbers)
        self.op_train("plain")

    def op_sync_running(self) -> None:
        how = self.pick("broadcast", "pool")
        self.log("  ", how)
        want: list[Buffers] = [dict(of) for of in self.buffers[0]]
        for n, own in enumerate(self.buffers[self.rank] if how == "pool" else ()):
            want[n] = dict(own)
            for name in [name for name in own if name.endswith("running_mean")]:
                var = name.replace("mean", "var")
                means, variances = (
                    torch.stack([of[n][key] for of in self.buffers]) for key in (name, var)
                )
                between = means.var(0, correction=0)
                want[n] |= {name: means.mean(0), var: variances.mean(0) + between}
        tb.sync_running_stats(self.chain, self.world, how=how)
        self.compare_buffers(want, "float32")


def check_machines_of_torch(world: Communicator) -> None:
    run_machines(TorchMachine, world, 1000 * world.size)


def check_machines_of_torch_without_shared_memory(world: Communicator) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MULTIBN_SHARED_MEMORY", "0")
        run_machines(partial(TorchMachine, names=("new", "pair")), world, 1000 * world.size + 500)
