"""Trainers on a contender's model: the stock one of transformers, or TRL's `SFTTrainer`; documents, and a collator.

A user writes the same: `convert_to_fp8(model)` before the Trainer, `OctavoCallback` in it for our models, AdamW as the
Trainer brings it, `bf16=True`, gradients clipped, the loss logged every ten steps. Documents come in order, so that all
contenders have the same batches. `SFTTrainer` pads with its own collator, on documents that are tokens already; it
would recompute activations by default, which nobody needs here and is off for all.
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
    documents = make_documents(case, workload, total * rows)
    watch = _Watch(clock, warmup, total, last)
    build = _build_sft if workload.name == "sft" else _build_stock
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "output_dir": folder,
            "per_device_train_batch_size": rows,
            "max_steps": total,
            "learning_rate": LEARNING_RATE,
            "bf16": True,
            "logging_steps": LOGGING_STEPS,
            "save_strategy": "no",
            "report_to": "none",
            "train_sampling_strategy": "sequential",
            "use_cpu": case.device == "cpu",
            "disable_tqdm": True,
        }
        callbacks = [*([OctavoCallback()] if contender.kind in OURS else []), watch]
        trainer = build(prepared, settings, documents, callbacks)
        for printing in (PrinterCallback, ProgressCallback):
            trainer.remove_callback(printing)
        trainer.train()
    return watch.loss


def _build_stock(
    prepared: PreparedModel, settings: dict[str, Any], documents: Sequence[Tensor], callbacks: list[TrainerCallback]
) -> Any:
    samples: Any = [{"input_ids": document} for document in documents]
    return Trainer(prepared.model, TrainingArguments(**settings), _collate, samples, callbacks=callbacks)


def _build_sft(
    prepared: PreparedModel, settings: dict[str, Any], documents: Sequence[Tensor], callbacks: list[TrainerCallback]
) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    config = SFTConfig(**settings, max_length=prepared.case.seq, gradient_checkpointing=False)
    samples = Dataset.from_dict({"input_ids": [document.tolist() for document in documents]})
    return SFTTrainer(prepared.model, config, train_dataset=samples, processing_class=_tokenizer(), callbacks=callbacks)


def _tokenizer() -> Any:
    """Return a tokenizer for documents that are tokens already: it has a token to pad with, and nothing to do."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1}, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


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
