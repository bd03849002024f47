"""A model in other people's trainers, compared with one process that repeats the batches."""

import copy
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import timm
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import Trainer, TrainingArguments

from multibn.torch_backend import convert_sync_batchnorm
from multibn.torch_backend.integrations.lightning import MultiBNLayerSync
from tests.programs.models import MODELS
from tests.programs.row import PER_RANK, STEPS, Row
from tests.programs.training import differences, prepared, state

Batch = tuple[Tensor, ...]  # what a rank sees in a step

NAME = "mobilenetv3_small_100"


def accelerate() -> Row:
    """Accelerator on CPU, and its file of the state after half of the steps. Collective."""
    network = _network()
    alone = copy.deepcopy(network)
    accelerator = Accelerator(cpu=True)
    converted = convert_sync_batchnorm(network, strict=True)
    optimizer = torch.optim.SGD(converted.parameters(), 0.01)
    model, optimizer, loader = accelerator.prepare(converted, optimizer, _loader(2 * STEPS))
    seen: list[Batch] = []
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)  # the first rank saves, and all load
        for number, (x,) in enumerate(loader):
            if number == STEPS:
                accelerator.save_state(shared[0])
                accelerator.wait_for_everyone()
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.zero_()
                accelerator.load_state(shared[0])
            seen.append((x,))
            optimizer.zero_grad()
            accelerator.backward(_loss(model, x))
            optimizer.step()
        dist.barrier()
    tried = f"Accelerator(cpu=True), timm's {NAME}, {2 * STEPS} steps, saved and loaded between"
    return _row("accelerate", tried, alone, model, seen)


def lightning() -> Row:
    """Lightning's Trainer with strategy="ddp". Collective."""
    network = _network()
    alone = copy.deepcopy(network)
    module = _Module(network)
    with tempfile.TemporaryDirectory() as directory:
        trainer = pl.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=dist.get_world_size(),
            plugins=[MultiBNLayerSync()],
            max_epochs=2,
            default_root_dir=directory,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
        )
        trainer.fit(module, _loader(STEPS))
    tried = f'Trainer(strategy="ddp", plugins=[MultiBNLayerSync()]), timm\'s {NAME}, 2 epochs'
    return _row("lightning", tried, alone, network, module.seen)


class _Module(pl.LightningModule):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.seen: list[Batch] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((batch[0],))
        return _loss(self.network, batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


def transformers() -> Row:
    """transformers' Trainer, with a loss of the model's own. Collective."""
    torch.manual_seed(0)
    network = prepared(next(m for m in MODELS if m.name == "RegNet").build())
    alone = copy.deepcopy(network)
    seen: list[Batch] = []
    network.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((kwargs["pixel_values"], kwargs["labels"])),
        with_kwargs=True,
    )
    data = [{"pixel_values": x, "labels": i % 2} for i, (x,) in enumerate(_loader(4).dataset)]
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            directory,
            use_cpu=True,
            per_device_train_batch_size=PER_RANK,
            num_train_epochs=1,
            optim="sgd",
            learning_rate=0.01,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            # Else the loss is multiplied by the number of ranks, for models that divide by all
            # samples. RegNet takes their number and does not use it (transformers 5.23).
            average_tokens_across_devices=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        converted = convert_sync_batchnorm(network, strict=True)
        Trainer(converted, arguments, train_dataset=data).train()
    tried = "Trainer, RegNetForImageClassification, an epoch"
    return _row(
        *("transformers", tried, alone, network, seen),
        lambda model, x, labels: model(pixel_values=x, labels=labels).loss,
    )


def _network() -> nn.Module:
    torch.manual_seed(0)
    return prepared(timm.create_model(NAME, num_classes=10))


def _loader(steps: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    samples = steps * dist.get_world_size() * PER_RANK
    data = torch.randn(samples, 3, 64, 64, generator=generator).double()
    return DataLoader(TensorDataset(data), PER_RANK, shuffle=True)


def _loss(network: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = network(x)
    return (y - x.flatten(1)[:, : y.shape[1]]).square().mean()


def _row(
    program: str,
    tried: str,
    alone: nn.Module,
    network: nn.Module,
    seen: Sequence[Batch],
    loss: Callable[..., Tensor] = _loss,
) -> Row:
    """Compare `network` with `alone` trained on what the ranks have seen together. Collective."""
    shares: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shares, list(seen))
    optimizer = torch.optim.SGD(alone.parameters(), 0.01)
    for batches in zip(*shares, strict=True):
        optimizer.zero_grad()
        loss(alone, *map(torch.cat, zip(*batches, strict=True))).backward()
        optimizer.step()
    (difference,) = differences(state(alone), state(network))
    return Row(program, tried, f"{len(seen)} steps", difference).judge()
