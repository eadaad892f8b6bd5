"""Run a function on several ranks: processes joined by gloo, forked from one that has imported the libraries already.

    results = on_ranks(2, train, "block", steps=6)     # train(rank, "block", steps=6) on each; a list by rank

The function must be importable (at the top level of a module), and what it takes and returns must pickle. The default
process group is there when it is called. A rank that raises fails the test with its traceback; ranks that do not answer
within the limit are killed, and the test fails: nothing hangs.
"""

import functools
import multiprocessing
import os
import tempfile
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

LIMIT = 1500  # seconds: less than pytest's limit for every test, so that ranks that hang are killed first
_CONTEXT = multiprocessing.get_context("forkserver")
PRELOAD = [
    *("octavo.hf", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torchao.optim"),
    *("transformers.models.llama.modeling_llama", "torch._dynamo", "octavo.cli", "octavo.training.loop"),
    "octavo.sft.run",
]
_CONTEXT.set_forkserver_preload(PRELOAD)


class RankFailed(Exception):
    """A rank raised; the message has its traceback."""


class NoAnswer(Exception):
    """A rank did not answer within the limit."""


def on_ranks(world: int, function: Any, *args: Any, limit: float = LIMIT, **kwargs: Any) -> list[Any]:
    """Return what `function(rank, *args, **kwargs)` returns on each of `world` ranks."""
    with tempfile.TemporaryDirectory() as folder:
        processes, ends = [], []
        call = functools.partial(function, **kwargs)
        for rank in range(world):
            end, other = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_run, args=(rank, world, folder, other, call, args), daemon=True)
            process.start()
            other.close()
            processes.append(process)
            ends.append(end)
        try:
            return _answers(ends, time.monotonic() + limit, limit)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(ends: list[Connection], deadline: float, limit: float) -> list[Any]:
    answers: dict[int, Any] = {}
    waiting = {id(end): rank for rank, end in enumerate(ends)}
    while waiting:
        ready = wait([ends[rank] for rank in waiting.values()], timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise NoAnswer(f"rank {', '.join(map(str, waiting.values()))}: no answer in {limit:g} s")
        for end in ready:
            rank = waiting.pop(id(end))
            try:
                error, answers[rank] = end.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} ended without an answer") from None
            if error:
                raise RankFailed(f"rank {rank}:\n{error}")
    return [answers[rank] for rank in range(len(ends))]


def _run(rank: int, world: int, folder: str, end: Connection, call: Any, args: tuple[Any, ...]) -> None:
    import torch
    from torch import distributed

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        store = distributed.FileStore(str(Path(folder) / "store"), world)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
        end.send((None, call(rank, *args)))
    except BaseException:
        end.send((traceback.format_exc(), None))
    finally:
        end.close()
        os._exit(0)  # a group that another rank has left would wait in its destructor
