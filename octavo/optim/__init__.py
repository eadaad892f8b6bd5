"""Optimisers by name: AdamW from torch, and AdamW with low-bit states from torchao.

AdamW keeps two numbers per parameter (the running mean of the gradient and of its square), 8 bytes in FP32: twice the
parameter itself. The low-bit variants store them in blocks with one FP32 scale each:

    adamw       8 bytes per parameter   torch.optim.AdamW
    adamw8bit   2                       256 dynamic levels, blocks of 256
    adamwfp8    2                       E4M3, blocks of 256
    adamw4bit   1                       16 levels, blocks of 128: cubes of sevenths; of squares, powers of two

Only a tensor with at least 4,096 elements whose count divides by the block is stored so; states of smaller ones are in
the parameter's own dtype. Of a tensor that FSDP2 shards, the block has to divide the count of every rank. The update is
computed in FP32. A BF16 weight that is rounded to nearest loses updates below a 256th of itself; with
`stochastic_rounding` they are kept on average.
"""

import importlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from octavo.optim.fused_adamw import with_fused_step
from octavo.optim.in_backward import offload_states, step_in_backward, steps_in_backward
from octavo.optim.masters import offload_master
from octavo.optim.split_masters import keep_masters
from octavo.optim.step_memory import StepMemory, measure_memory

__all__ = [
    "OPTIMIZERS",
    "StepMemory",
    "build_optimizer",
    "keep_masters",
    "measure_memory",
    "offload_master",
    "offload_states",
    "set_learning_rate",
    "step_in_backward",
    "steps_in_backward",
]

LOW_BIT = {"adamw8bit": "AdamW8bit", "adamw4bit": "AdamW4bit", "adamwfp8": "AdamWFp8"}
OPTIMIZERS = ("adamw", *LOW_BIT)
_VARIANTS = ("fused", "foreach")


def build_optimizer(
    name: str,
    params: ParamsT,
    lr: float,
    weight_decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    *,
    stochastic_rounding: bool = False,
) -> torch.optim.Optimizer:
    """Build the optimiser called `name`, one of `OPTIMIZERS`, for parameters or parameter groups.

    `stochastic_rounding`: round BF16 parameters stochastically after each update.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer={name!r}: choose from {', '.join(OPTIMIZERS)}")
    parameters: list[Any] = list(params)
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "betas": betas}
    if name == "adamw" and not stochastic_rounding:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, **options)
        if all(p.is_cuda for group in optimizer.param_groups for p in group["params"]):
            # Makes no copies of all tensors, unlike torch's other implementations. On a CPU it ignores strides.
            groups = [
                {name: x for name, x in group.items() if name not in _VARIANTS} for group in optimizer.param_groups
            ]
            optimizer = torch.optim.AdamW(groups, **options, fused=True)
    else:
        optimizer_class = with_fused_step(getattr(_torchao_optim(name), LOW_BIT.get(name, "_AdamW")))
        optimizer = optimizer_class(parameters, **options, bf16_stochastic_round=stochastic_rounding)
    optimizer.register_load_state_dict_pre_hook(_keep_variant)
    return optimizer


def _keep_variant(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
    """Keep this optimiser's `fused` and `foreach`: torch would take over those of the checkpoint."""
    own = {name: optimizer.defaults[name] for name in _VARIANTS if name in optimizer.defaults}
    groups = [{name: x for name, x in group.items() if name not in _VARIANTS} | own for group in loaded["param_groups"]]
    return {**loaded, "param_groups": groups}


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the rate of every group; in place where it is a tensor (torchao), so that nothing is compiled again."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def _torchao_optim(name: str) -> ModuleType:
    try:
        with _quiet("torchao"):
            return importlib.import_module("torchao.optim")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torchao":
            raise
        raise ModuleNotFoundError(
            f"optimizer={name!r} needs torchao: pip install octavo[optim] (or plain optimizer='adamw')", name="torchao"
        ) from error


@contextmanager
def _quiet(logger_name: str) -> Iterator[None]:
    """Silence warnings about CUDA libraries that torchao cannot load on a CPU; its optimisers use none of them."""
    logger = logging.getLogger(logger_name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
