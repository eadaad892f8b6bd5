"""The stock `transformers.Trainer` on a contender's model: a list of documents, and a collator that pads.

A user writes the same: `convert_to_fp8(model)` before the Trainer, `OctavoCallback` in it for our models, AdamW as the
Trainer brings it, `bf16=True`, gradients clipped, the loss logged every ten steps. Documents come in order, so that all
contenders have the same batches.
"""

import tempfile
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from octavo.hf.callback import OctavoCallback
from octavo.tools.bench.contenders import OURS, Contender
from octavo.tools.bench.prepared_model import LEARNING_RATE, PreparedModel
from octavo.tools.bench.timing import StepClock
from octavo.tools.bench.workload import Workload, make_documents, pad

LOGGING_STEPS = 10


def train(
    prepared: PreparedModel,
    contender: Contender,
    workload: Workload,
    clock: StepClock,
    *,
    warmup: int,
    steps: int,
    last: int,
) -> float:
    """Train for `warmup` and then `steps` optimiser steps, those on the clock; return the mean loss of the `last`."""
    case = prepared.case
    rows, total = case.tokens // case.seq, warmup + steps
    documents = [{"input_ids": document} for document in make_documents(case, workload, total * rows)]
    watch = _Watch(clock, warmup, total, last)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainingArguments(
            folder,
            per_device_train_batch_size=rows,
            max_steps=total,
            learning_rate=LEARNING_RATE,
            bf16=True,
            logging_steps=LOGGING_STEPS,
            save_strategy="no",
            report_to="none",
            train_sampling_strategy="sequential",
            use_cpu=case.device == "cpu",
            disable_tqdm=True,
        )
        callbacks = [*([OctavoCallback()] if contender.kind in OURS else []), watch]
        trainer = Trainer(prepared.model, settings, _collate, documents, callbacks=callbacks)
        for printing in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing)
        trainer.train()
    return watch.loss


def _collate(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    return pad([sample["input_ids"] for sample in samples]).inputs


class _Watch(TrainerCallback):
    """Marks the ends of steps, and has the loss of the last ones logged."""

    def __init__(self, clock: StepClock, warmup: int, total: int, last: int) -> None:
        self._clock, self._warmup, self._total, self._last = clock, warmup, total, last
        self.loss = float("nan")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.global_step == self._warmup:
            self._clock.start()
        elif state.global_step > self._warmup:
            self._clock.mark()
        if state.global_step in (self._total - self._last, self._total):
            control.should_log = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:  # noqa: ARG002
        self.loss = float(logs.get("loss", self.loss))  # the summary at the end has none
