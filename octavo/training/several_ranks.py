"""One run on several ranks: processes that a launcher has started, each with a share of every step's sequences.

    torchrun --nproc-per-node 8 -m octavo train …       any launcher that sets RANK, WORLD_SIZE, LOCAL_RANK
    octavo train --nproc 8 …                            Octavo's own, on one machine (octavo/cli/launcher.py)

A run means the same on any number of ranks: its step has `batch × micro_batches` sequences, of which each rank takes
`1 / ranks`; gradients are averaged, and the loss is the mean of all. Rank 0 alone prints, and writes everything but its
fellows' shards of checkpoints.
"""

import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console
from torch import Tensor, distributed, nn

from octavo.dist.together import from_all, from_first, host_group, rank
from octavo.nn.sharded import ranks
from octavo.training.environment import launched_ranks, whole_number
from octavo.training.errors import LostContact, UserError
from octavo.training.settings import TrainSettings
from octavo.training.signals import ECHO, StopSignals

Result = TypeVar("Result")
# What gloo, NCCL's watchdog and the store of the ranks say where another rank has ended.
_LOST = ("Connection closed", "Connection reset", "Broken pipe", "Timed out", "NCCL", "recvValue failed")


def is_first() -> bool:
    """True in the process that prints and writes: rank 0, or the only one. Known before ranks have met."""
    return os.environ.get("RANK", "0") == "0" or launched_ranks() == 1


@contextmanager
def met(device: str) -> Iterator[None]:
    """Join the other ranks, if a launcher has started any, for the length of a run."""
    if launched_ranks() == 1 or distributed.is_initialized():
        yield
        return
    on_gpu = device == "cuda"
    if on_gpu:
        _take_gpu()
    try:
        distributed.init_process_group("nccl" if on_gpu else "gloo")
    except (distributed.DistError, ValueError) as error:
        raise UserError(f"the ranks did not meet: {str(error).splitlines()[0]}") from error
    try:
        with lost_contact():
            host_group()
            yield
    finally:
        distributed.destroy_process_group()


@contextmanager
def lost_contact() -> Iterator[None]:
    """Turn what torch says where another rank has ended into one line; `LostContact` blames no rank."""
    try:
        yield
    except RuntimeError as error:
        words = str(error)
        if ranks() == 1 or not any(part in words for part in _LOST):
            raise
        raise LostContact(
            f"rank {rank()} has lost contact with another rank, which has ended; the last checkpoint is intact"
        ) from error


def check_alike(settings: dict[str, Any], digest: str) -> None:
    """Raise if ranks were started with other options, or read other data: on several machines both may happen."""
    for name, value in (("options", settings), ("data", digest)):
        everyone = from_all(value)
        for number, other in enumerate(everyone):
            if other != everyone[0]:
                raise UserError(f"rank {number} was started with other {name} than rank 0: give all ranks the same")


def console_of(console: Console | None) -> Console:
    """The console of rank 0; one that says nothing on the others."""
    return (console or Console()) if is_first() else Console(file=io.StringIO(), quiet=True)


@contextmanager
def folder_of(opened: Any) -> Iterator[Path]:
    """Open a run's folder on rank 0, and give its path to all. `opened`: a function that returns the context."""
    if rank() == 0:
        with opened() as folder:
            from_first(str(folder))
            yield folder
    else:
        yield Path(from_first(None))


def first_then_others(action: Callable[[], Result]) -> Result:
    """Call a function on rank 0, and then on the others: what it makes or downloads is there for them."""
    result = action() if rank() == 0 else None
    from_first(None)
    return action() if result is None else result


def wrapped(model: nn.Module, settings: TrainSettings) -> nn.Module:
    """Return the model to call in training, on several ranks: with gradients averaged, by DDP or FSDP2."""
    if settings.ranks == 1:
        return model
    if settings.strategy == "ddp":
        ids = [torch.cuda.current_device()] if settings.device == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    from torch.distributed.fsdp import fully_shard

    fully_shard(model)
    return model


def saved_by_others(saved_by: int) -> str:
    """Say what it means that a checkpoint is of another number of ranks."""
    here, there = ("1 rank" if number == 1 else f"{number} ranks" for number in (ranks(), saved_by))
    return f"Resuming on {here} what {there} saved: the same steps, within rounding; bit for bit only on {there}"


def nproc() -> str:
    """Return the option that starts as many ranks as there are; empty for one process, and for several machines."""
    on_this_machine = int(os.environ.get("LOCAL_WORLD_SIZE", ranks()))
    return f" --nproc {ranks()}" if 1 < ranks() == on_this_machine else ""


def own_random_numbers(seed: int) -> None:
    """Let each rank draw its own dropout and rounding, after equal weights; rank 0 as a single process would."""
    if rank():
        torch.manual_seed(hash((seed, rank())))  # of numbers: the same in every process


@torch.no_grad()
def mean_of_ranks(loss: Tensor) -> Tensor:
    """The mean of a loss over all ranks, so that all of them decide alike whether a step is skipped."""
    if ranks() == 1:
        return loss
    distributed.all_reduce(loss)
    return loss / ranks()


def anyone_asks(signal: int | None) -> int | None:
    """The signal that any rank was sent, so that all stop after the same step. Through host memory."""
    if ranks() == 1:
        return signal
    asked = torch.tensor(signal or 0)
    distributed.all_reduce(asked, distributed.ReduceOp.MAX, group=host_group())
    return int(asked) or None


def agree_on_stops(stop: StopSignals) -> None:
    """Let a signal to one rank stop all, and count one that comes by two ways once."""
    if launched_ranks() > 1:
        stop.shared, stop.echo = anyone_asks, ECHO


def _take_gpu() -> None:
    local, there = whole_number("LOCAL_RANK", 0), torch.cuda.device_count()
    if local >= there:
        raise UserError(f"rank {local} of this machine has no GPU: torch sees {there}; start at most as many ranks")
    torch.cuda.set_device(local)
