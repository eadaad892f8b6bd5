"""`RunTrainer`: the training step of a run, queued on a GPU without waiting for its result.

Whether a step is skipped is decided on the GPU: torch's fused AdamW takes a flag, as from its gradient scaler, and with
it changes neither parameters nor states. Loss and norm are copied to the host behind the step, and read when the next
steps are queued. Other optimisers have no such flag; with them the host waits for loss and norm before each update.
"""

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from octavo.nn.sharded import is_sharded
from octavo.training.several_ranks import mean_of_ranks
from octavo.training.trainer import Batch, FP8Trainer, Step


class Moment:
    """A point in the work of a GPU, which it may not have reached yet, or in the time of a CPU, which never lags."""

    def __init__(self, device: torch.device) -> None:
        self._time = time.perf_counter()
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, earlier: "Moment") -> float:
        if self._event is None:
            return self._time - earlier._time
        self.wait()
        milliseconds: float = earlier._event.elapsed_time(self._event)
        return milliseconds / 1000


class TakenStep:
    """A step that is queued. Reading its result waits until the device has computed it."""

    def __init__(self, loss_and_norm: Tensor, began: Moment) -> None:
        self._loss_and_norm = loss_and_norm.to("cpu", non_blocking=True)  # into pinned memory
        self._began, self._ended = began, Moment(loss_and_norm.device)

    @property
    def result(self) -> Step:
        self._ended.wait()
        loss, norm = self._loss_and_norm.tolist()
        return Step(loss, norm, skipped=not (math.isfinite(loss) and math.isfinite(norm)))

    @property
    def seconds(self) -> float:
        """Time from the beginning of the step to its end, on the device."""
        return self._ended.seconds_since(self._began)


class RunTrainer(FP8Trainer):
    """`FP8Trainer` for a run, which shows skipped steps itself and also skips those with a non-finite loss.

    Steps that are queued are not counted here, and leave `last_step` as it is: the run reads what `take_step` returns.
    """

    _queued: Tensor | None = None

    @property
    def queues(self) -> bool:
        """True if steps are queued: with torch's fused AdamW on a GPU, on whole parameters."""
        groups = self.optimizer.param_groups
        return type(self.optimizer) is torch.optim.AdamW and all(
            group["fused"] and all(p.is_cuda and not is_sharded(p) for p in group["params"]) for group in groups
        )

    def take_step(self, batches: Iterable[Batch]) -> Step | TakenStep:
        """Take one optimiser step with these micro-batches."""
        began = Moment(next(self.model.parameters()).device)
        for batch in batches:
            self.training_step(batch)
        if self._queued is None:
            assert self.last_step is not None
            return self.last_step
        queued, self._queued = self._queued, None
        return TakenStep(queued, began)

    def should_skip(self, step: Step) -> bool:
        return not (math.isfinite(step.loss) and math.isfinite(step.grad_norm))

    def _clip_gradients(self) -> Tensor:
        assert self._loss_sum is not None
        self._loss_sum = mean_of_ranks(self._loss_sum)
        return super()._clip_gradients()

    def _apply_gradients(self) -> None:
        if not self.queues:
            super()._apply_gradients()
            return
        self._queued = self._clip_gradients()
        optimizer: Any = self.optimizer
        optimizer.found_inf = (~self._queued.isfinite().all()).float()
        optimizer.step()  # histories of scales follow it, whether it changes anything or not
        optimizer.zero_grad(set_to_none=True)
