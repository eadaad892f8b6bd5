"""`FP8Trainer`: the training step around a model and an optimiser that already exist.

Each `training_step(batch)` is one micro-batch: forward in FP8, backward, and on every
`gradient_accumulation_steps`-th call the gradients are clipped and applied. Over n micro-batches:

    loss = mean of the n losses
    grad = mean of the n gradients       summed in buffers of their own (`gradients.py`) while they accumulate
    grad *= min(1, max_grad_norm / ‖grad‖)
    parameters, optimiser states and FP8 histories are updated only if ‖grad‖ is finite

Loss and norm are read together, before the update is queued: the only time that the host waits for the device.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from octavo.convert import can_convert, convert_to_fp8
from octavo.dist.checkpoint import unwrapped
from octavo.dist.optimizer_states import check_trains
from octavo.dist.random_states import get_rng_states, set_rng_states
from octavo.dist.together import all_or_none, rank
from octavo.dist.whole import has_shards, whole, whole_state
from octavo.models.bdh import fused_layers
from octavo.nn.autocast import FP8Autocast, fp8_autocast
from octavo.nn.linear import LinearInFP8
from octavo.nn.model_report import report_of
from octavo.nn.report import Report
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.checks import check_choice
from octavo.numerics.config import check_config
from octavo.optim import keep_masters, offload_master, offload_states, step_in_backward
from octavo.optim.in_backward import InBackward
from octavo.optim.out_of_memory import explained
from octavo.optim.split_masters import why_without_masters
from octavo.support import check_fp8_support
from octavo.training.files import disk_errors, model_file
from octavo.training.gradients import GRADIENTS, GradientSums, default_for
from octavo.training.model_files import Gathered, read_model, write_model

OFFLOADS = ("optimizer", "master")

logger = logging.getLogger("octavo")
Batch = Mapping[str, Any] | tuple[Any, ...] | list[Any]


@dataclass(frozen=True)
class Step:
    """One optimiser step: the mean loss of its micro-batches, and the gradient norm before clipping.

    A skipped step updated nothing. The norm is 0 where gradients are released, since they are never there together.
    """

    loss: float
    grad_norm: float
    skipped: bool = False


class FP8Trainer:
    """Trains `model` with `optimizer` in FP8.

    With `convert_model_to_fp8`, the linears are converted in place; a model without any (raw parameters and `@`) runs
    under the autocast instead. Without it, the model is trained as it is, including an FP8 one converted before; a
    fused BDH is in either case.
    Batches: a dict for models that return an object or dict with `loss`; a tuple for models that return a loss, or
    `(..., loss)`. With `loss_fn`, a tuple is `(*inputs, target)` and the loss is `loss_fn(model(*inputs), target)`.
    `release_gradients`: each is applied within backward and then freed (`octavo.optim.step_in_backward`); steps are
    then not skipped for non-finite gradients, which are found too late. `offload="optimizer"`: its
    states live in host memory (`octavo.optim.offload_states`). `offload="master"`: FP32 master weights do, too, and the
    linears' weights are in FP8 only (`octavo.optim.offload_master`); gradients are then released in any case.
    `gradients`: precision of their sums over micro-batches: `fp32` (the default), 4 bytes per parameter; `bf16`, 2
    bytes, or `fp8`, one byte, both rounded stochastically, so that sums are unbiased and each addition is off by up to
    a 128th or an 8th. Without accumulation, gradients have the dtype of the parameters, and there is no choice.
    `master_weights`: BF16 weights, but not shards, are stepped as FP32 ones, whose lower halves the optimiser keeps, 2
    bytes per parameter, with FP32 moments (`octavo.optim.keep_masters`); the default, unless the model was loaded
    without. False rounds weights to BF16 after each step. `autocast_dtype`: forward runs under `torch.autocast` with
    this dtype, such as `torch.bfloat16` for a model with FP32 parameters.

    After each optimiser step, `last_step` has its loss and gradient norm. A step whose gradient norm is non-finite is
    skipped, with a warning; override `should_skip` for another rule.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        fp8_config: FP8TrainingConfig | str | None = None,
        convert_model_to_fp8: bool = True,
        *,
        gradient_accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        release_gradients: bool = False,
        offload: str | None = None,
        gradients: str | None = None,
        master_weights: bool | None = None,
        autocast_dtype: torch.dtype | None = None,
    ) -> None:
        if gradient_accumulation_steps < 1:
            raise ValueError(f"gradient_accumulation_steps={gradient_accumulation_steps!r}: at least 1")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={max_grad_norm!r}: a number above 0, or None for no limit")
        if offload not in (None, *OFFLOADS):
            raise ValueError(
                f"offload={offload!r}: 'optimizer', for its states in host memory, 'master', for FP32 weights, too, or "
                "None"
            )
        if release_gradients or offload == "master":
            why = "release_gradients=True" if release_gradients else "offload='master'"
            _check_release(why, model, gradient_accumulation_steps, max_grad_norm)
        check_trains(optimizer, model)
        self.gradients = _gradients_kind(gradients, model, gradient_accumulation_steps)
        self.model = model
        self.optimizer = optimizer
        self.fp8_config = check_config(fp8_config)
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.max_grad_norm = max_grad_norm
        self.loss_fn = loss_fn
        self.autocast_dtype = autocast_dtype
        self.micro_step = 0
        self.step = 0
        self.skipped_steps = 0
        self.grad_norm: Tensor | None = None
        self.last_step: Step | None = None
        self._loss_sum: Tensor | None = None  # sum so far of losses / gradient_accumulation_steps
        self._fp8: FP8Autocast | None = None
        self._saved: Path | None = None
        self.scaling: FP8ScalingManager | None = None
        self.report: Report | None = None
        self._set_up_fp8(convert_model_to_fp8)
        self._sums = GradientSums(model, self.gradients) if gradient_accumulation_steps > 1 else None
        keep_masters(model.parameters(), master_weights)
        if rank() == 0 and master_weights is None and (why := why_without_masters(optimizer)):
            logger.warning(why)
        self._released: InBackward | None = None
        if offload == "master":
            self._released = offload_master(model, optimizer)
        elif release_gradients:
            self._released = step_in_backward(optimizer, offload=offload is not None)
        elif offload is not None:
            offload_states(optimizer)

    def _set_up_fp8(self, convert: bool) -> None:
        model = unwrapped(self.model)  # the names of its layers have no prefix
        converted = [m for m in model.modules() if isinstance(m, LinearInFP8)]
        if fused := fused_layers(model):
            self.report, self.scaling = fused.report, fused.scaling
        elif converted:  # earlier, or loaded with weights frozen in FP8, whose adapters stay as they are
            self.report = report_of(model)
            self.scaling = converted[0].scaling
            logger.info("%s", self.report.summary())
        elif convert and can_convert(model, self.fp8_config):
            report = convert_to_fp8(model, self.fp8_config)
            self.report, self.scaling = report, report.scaling
            logger.info("%s", report.summary())
        elif convert:
            self._fp8 = fp8_autocast(self.fp8_config, model=model)
            self.report, self.scaling = self._fp8.report, self._fp8.scaling
            logger.info("no nn.Linear to convert in %s: its products run under fp8_autocast", type(model).__name__)
        if self.scaling is None:
            logger.info("training %s as it is: convert_model_to_fp8=False", type(model).__name__)
        else:
            device = next(model.parameters()).device
            support = check_fp8_support(device)
            logger.info("FP8 training enabled with format: %s", self.fp8_config.fp8_format.lower())
            logger.info("%s", support if support else f"FP8 is emulated on {device}: {support.reason}")

    @property
    def scaling_manager(self) -> FP8ScalingManager | None:
        """Another name for `scaling`."""
        return self.scaling

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Region in which the model computes as it does in training; use it to evaluate or to generate."""
        with ExitStack() as stack:
            if self.autocast_dtype is not None:
                device = next(self.model.parameters()).device
                stack.enter_context(torch.autocast(device.type, dtype=self.autocast_dtype))
            if self._fp8 is not None:
                stack.enter_context(self._fp8)
            yield

    def training_step(self, batch: Batch) -> Tensor:
        """Run one micro-batch: forward, backward and, when due, the optimiser's step. Returns its loss.

        An out-of-memory error carries a note that says what took the memory, and what would take less.
        """
        with explained(self.model, self.optimizer, self._ways_to_take_less, self._last_saved):
            return self._micro_batch(batch)

    def _micro_batch(self, batch: Batch) -> Tensor:
        self.model.train()
        if not isinstance(batch, Mapping | tuple | list):
            raise TypeError(f"batch is a {type(batch).__name__}: a dict, or a tuple such as (inputs, targets)")
        with self.autocast():
            loss = self._loss(batch)
        if loss.dim() or not loss.requires_grad:
            raise ValueError(
                f"loss has shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}: a scalar with a graph"
            )
        is_last = (self.micro_step + 1) % self.gradient_accumulation_steps == 0
        share = loss / self.gradient_accumulation_steps
        try:
            with nullcontext() if self._sums is None else self._sums.adding(self.micro_step, is_last=is_last):
                share.backward()
        except BaseException:
            self._drop_gradients()
            raise
        self.micro_step += 1
        so_far = 0.0 if self._loss_sum is None else self._loss_sum
        self._loss_sum = so_far + share.detach().float()
        if is_last:
            self._apply_gradients()
        return loss.detach()

    def _drop_gradients(self) -> None:
        """Discard partial gradients after a failed backward, so that a retry does not count them twice.

        The step starts over with the next micro-batch.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self._loss_sum = None
        if self._released is not None:
            self._released.reset()
        dropped = self.micro_step % self.gradient_accumulation_steps
        self.micro_step -= dropped
        if self._sums is not None:
            self._sums.clear()
            logger.warning("backward broke off: the step begins anew, without its %d micro-batches so far", dropped)

    def _ways_to_take_less(self) -> dict[str, str]:
        more = 2 * self.gradient_accumulation_steps
        ways = {
            "batch": f"half the batch, with gradient_accumulation_steps={more} for the same step",
            "activations": 'FP8TrainingConfig(activations="fp8")',
            "checkpointing": "model.gradient_checkpointing_enable()",
            "offload": 'offload="optimizer"',
        }
        ways |= {name: f'octavo.optim.build_optimizer("{name}", …)' for name in ("adamw8bit", "adamw4bit")}
        if self.gradient_accumulation_steps == 1 and self.max_grad_norm is None:
            ways["release"] = "release_gradients=True"
        return ways

    def _last_saved(self) -> str:
        return f"the model that was saved last, {self._saved}, is intact" if self._saved else ""

    def _loss(self, batch: Mapping[str, Any] | tuple[Any, ...] | list[Any]) -> Tensor:
        device = next(self.model.parameters()).device
        if isinstance(batch, Mapping):
            output = self.model(**{name: _to(value, device) for name, value in batch.items()})
        elif self.loss_fn is not None:
            *inputs, target = (_to(value, device) for value in batch)
            return self.loss_fn(self.model(*inputs), target)
        else:
            output = self.model(*(_to(value, device) for value in batch))
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None and isinstance(output, tuple | list):
            loss = next((x for x in reversed(output) if isinstance(x, Tensor) and x.dim() == 0), None)
        if loss is None and isinstance(output, Tensor) and output.dim() == 0:
            loss = output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"{type(self.model).__name__} returned {type(output).__name__} without a loss: return an object with "
                ".loss, a scalar tensor or (..., loss), or pass loss_fn to FP8Trainer"
            )
        return loss

    def should_skip(self, step: Step) -> bool:
        """Return True, and log why, for a step whose gradient norm is non-finite."""
        if math.isfinite(step.grad_norm):
            return False
        logger.warning("gradient norm is %s: step skipped (%d so far)", step.grad_norm, self.skipped_steps + 1)
        return True

    def _clip_gradients(self) -> Tensor:
        """Clip the gradients; return the loss of the step and their norm before, without waiting for the device."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        norm = get_total_norm(gradients)
        if self.max_grad_norm is not None:
            clip_grads_with_norm_(self.model.parameters(), self.max_grad_norm, norm)
        self.grad_norm = whole(norm)  # of shards, a DTensor
        assert self._loss_sum is not None
        loss_and_norm = torch.stack((self._loss_sum.to(self.grad_norm.device), self.grad_norm))
        self._loss_sum = None
        return loss_and_norm

    def _apply_gradients(self) -> None:
        step = Step(*self._clip_gradients().tolist())  # the one host synchronisation of a step
        if self.should_skip(step):
            step = replace(step, skipped=True)
            self.skipped_steps += 1
            if self.scaling is not None:
                self.scaling.step()  # forget this step's amax values
        else:
            self.optimizer.step()
            self.step += 1
        self.last_step = step
        self.optimizer.zero_grad(set_to_none=True)

    def save_model(self, path: str | Path) -> Path:
        """Write the weights: safetensors, or `torch.save`'s format if the name ends in `.pt` or `.pth`.

        A folder gets a `model.safetensors`. The file appears under its name only when it is complete. On several ranks,
        rank 0 writes. A sharded model (FSDP2) is gathered for it, so all ranks call this; they return when it is there.
        """
        path = model_file(Path(path))
        sharded = has_shards(self.model)
        model = Gathered(whole_state(self.model)) if sharded else self.model
        # Of a model that every rank has whole, rank 0 may be the only one that calls: no other is waited for.
        with disk_errors(path, "check the path and the space left"), all_or_none() if sharded else nullcontext():
            if rank() == 0:
                write_model(model, path)
        self._saved = path
        logger.info("saved %s", path)
        return path

    def load_model(self, path: str | Path) -> None:
        """Read weights that `save_model` wrote, into the model's own Parameters."""
        path = model_file(Path(path))
        if not path.exists():
            raise FileNotFoundError(f"{path}: no such model file")
        read_model(self.model, path)
        logger.info("loaded %s", path)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that training depends on, including a partial accumulation and random number states."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaling": self.scaling.state_dict() if self.scaling is not None else None,
            "accumulated": self._sums.state_dict() if self._sums is not None else {},
            "loss_sum": self._loss_sum,
            "counters": {"micro_step": self.micro_step, "step": self.step, "skipped_steps": self.skipped_steps},
            "rng": get_rng_states(p.device for p in self.model.parameters()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if (state["scaling"] is None) != (self.scaling is None):
            raise ValueError("the saved state and this trainer disagree on FP8: build both with the same conversion")
        if self.scaling is not None:
            self.scaling.load_state_dict(state["scaling"])
        if self._sums is not None:
            self._sums.load_state_dict(state["accumulated"])
        elif state["accumulated"]:
            raise ValueError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}: the saved state is in the middle of "
                "an accumulation; go on with the number of steps it was saved with"
            )
        loss_sum = state.get("loss_sum")  # not in states of earlier versions
        self._loss_sum = None if loss_sum is None else loss_sum.to(next(self.model.parameters()).device)
        for name, value in state["counters"].items():
            setattr(self, name, value)
        if "rng" in state:
            set_rng_states(state["rng"])
        else:
            logger.warning("the saved state is of a version without random number states: dropout will differ")


def _gradients_kind(asked: str | None, model: nn.Module, accumulation: int) -> str:
    if asked is not None:
        check_choice("gradients", asked, GRADIENTS)
    if accumulation > 1:
        return asked or "fp32"
    dtype = default_for(model)
    if asked not in (None, dtype):
        raise ValueError(
            f"gradients={asked!r} with gradient_accumulation_steps=1: they are not summed, so they are what the "
            f"parameters are ({dtype}); leave gradients out, or accumulate"
        )
    return dtype


def _check_release(why: str, model: nn.Module, accumulation: int, limit: float | None) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(f"{why} with DistributedDataParallel: gradients would be applied before they are averaged")
    if accumulation > 1:
        raise ValueError(
            f"{why} with gradient_accumulation_steps={accumulation}: gradients that are to be summed have to be kept; "
            "use one of the two"
        )
    if limit is not None:
        raise ValueError(
            f"{why} with max_grad_norm={limit}: their norm is known only when all are there; leave max_grad_norm out, "
            "or keep them"
        )


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
