"""TRL's `SFTTrainer` for a run: its configuration, and the figures of each step.

The trainer counts real tokens and collects the loss and the gradient norm of every step as tensors on the device. They
are read together where a line is logged or a checkpoint is saved, so that no other step waits for the device; each step
is a row of `metrics.jsonl` all the same.

A checkpoint of transformers' Trainer is a folder that fills up file by file. The last file written here is `COMPLETE`:
a folder without it was interrupted, and is not resumed from.
"""

import json
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import PrinterCallback, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from trl import SFTConfig, SFTTrainer

from octavo.dist.together import from_all, rank
from octavo.hf.callback import scaling_managers
from octavo.hf.speed import Speed
from octavo.nn.sharded import forget_uncalled, ranks
from octavo.sft.display import Display
from octavo.sft.settings import OPTIMIZERS, SFTSettings
from octavo.training.errors import RunError
from octavo.training.files import write_json
from octavo.training.run_folder import CHECKPOINTS, Metrics
from octavo.training.signals import StopSignals

COMPLETE = "octavo-complete.json"
KEEP = 2


class Arguments(SFTConfig):
    """TRL's configuration, with a device that `torch.load` knows.

    On a CPU, Accelerate gives rank 1 the device `cpu:1`. The Trainer reads its optimiser's file to it in a resumed run,
    and torch knows no place of that name.
    """

    @property
    def device(self) -> torch.device:
        device = super().device
        return torch.device("cpu") if device.type == "cpu" else device


@dataclass
class Step:
    """Figures of one step, on the device until they are read."""

    number: int
    loss: Tensor
    norm: Tensor | float
    tokens: Tensor | int
    lr: float


class Trainer(SFTTrainer):
    """`SFTTrainer` that remembers the loss, the gradient norm and the real tokens of the current step."""

    step_loss: Any
    step_norm: Any
    step_tokens: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remove_callback(PrinterCallback)
        self.begin_step()
        clip = self.accelerator.clip_grad_norm_

        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.step_norm = clip(*args, **kwargs)
            return self.step_norm

        self.accelerator.clip_grad_norm_ = recorded  # the Trainer hands the norm to its log alone

    def begin_step(self) -> None:
        self.step_loss = 0.0
        self.step_norm = math.nan
        self.step_tokens = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        mask = inputs.get("attention_mask")
        self.step_tokens = self.step_tokens + (inputs["input_ids"].numel() if mask is None else mask.sum())
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.step_loss = self.step_loss + loss
        return loss


class Figures(TrainerCallback):
    """Rows of metrics for every step, checkpoints that are known to be complete, and stops on request."""

    def __init__(self, metrics: Metrics, stop: StopSignals, log_interval: int, display: Display) -> None:
        self.metrics = metrics
        self.stop = stop
        self.log_interval = log_interval
        self.display = display
        self.trainer: Any = None
        self.tokens = 0
        self._lr = 0.0
        self._pending: list[Step] = []
        self._speed = Speed()

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self._speed = Speed(self.tokens)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._lr = float(self.trainer.optimizer.param_groups[0]["lr"])  # after the step, it is the next one's

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        trainer, number = self.trainer, state.global_step
        self._pending.append(Step(number, trainer.step_loss, trainer.step_norm, trainer.step_tokens, self._lr))
        trainer.begin_step()
        if self.stop.asked():
            control.should_save = control.should_training_stop = True
        log = number == 1 or number % self.log_interval == 0 or number == state.max_steps
        if log or control.should_save:
            self._write_rows(log)
        self._speed.step_ended()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        forget_uncalled(kwargs["model"])  # TRL's evaluation multiplies by the head's weight, and does not call the head

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.display.held_out(state.global_step, kwargs["metrics"]["eval_loss"])
        self._speed.other_work_ended()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.metrics.sync()  # a checkpoint must not be newer than the rows that it continues
        from_all(None)  # every rank has written its files
        if rank() == 0:
            folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
            write_json(folder / COMPLETE, {"step": state.global_step, "tokens": self.tokens, "ranks": ranks()})
        self._speed.other_work_ended()

    def _write_rows(self, log: bool) -> None:
        steps, self._pending = self._pending, []
        own = [(float(step.loss), float(step.norm), int(step.tokens)) for step in steps]
        figures = [_of_all(of_step) for of_step in zip(*from_all(own), strict=True)]
        rate = self._speed.since_last_log(self.tokens + sum(tokens for _, _, tokens in figures))
        for step, (loss, norm, tokens) in zip(steps, figures, strict=True):
            self.tokens += tokens
            row: dict[str, Any] = {
                "step": step.number,
                "loss": loss,
                "lr": step.lr,
                "grad_norm": norm,
                "tokens": self.tokens,
            }
            row |= {"tokens_per_s": rate, "skipped": False}
            if log and step is steps[-1]:
                row["scaling"] = {
                    name: reading
                    for manager in scaling_managers(self.trainer.model)
                    for name, reading in manager.statistics(reset=False).items()
                }
            _require_finite(row)
            self.metrics.append(row)
            self.display.step(row, log and step is steps[-1])


def _of_all(figures: tuple[tuple[float, float, int], ...]) -> tuple[float, float, int]:
    """Return the loss, the norm and the tokens of a step over all ranks; the norm is that of averaged gradients."""
    losses, norms, tokens = zip(*figures, strict=True)
    return sum(losses) / len(losses), norms[0], sum(tokens)


def _require_finite(row: dict[str, Any]) -> None:
    for name, words in (("loss", "loss"), ("grad_norm", "gradient norm")):
        if not math.isfinite(row[name]):
            raise RunError(
                f"the {words} of step {row['step']} is not finite: the weights are spoilt from there on; start again "
                f"with a smaller --lr (it was {row['lr']:g} in that step), or --precision bf16"
            )


def training_arguments(settings: SFTSettings, folder: Path) -> Arguments:
    """Return TRL's configuration. The number of steps is set when the trainer knows its rows: see `plan_steps`."""
    layout = settings.layout
    on_gpu = settings.device == "cuda"
    shards: dict[str, Any] = {}
    if settings.strategy == "fsdp2":
        shards = {"fsdp": True, "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
    config = Arguments(
        output_dir=str(folder / CHECKPOINTS),
        per_device_train_batch_size=settings.own_batch,
        per_device_eval_batch_size=settings.own_batch,
        gradient_accumulation_steps=settings.own_micro_batches,
        ddp_find_unused_parameters=False if settings.ranks > 1 and not shards else None,
        **shards,
        learning_rate=settings.lr,
        lr_scheduler_type=settings.schedule if settings.schedule != "constant" else "constant_with_warmup",
        max_grad_norm=settings.clip,
        weight_decay=settings.weight_decay,
        optim=OPTIMIZERS[settings.optimizer],
        gradient_checkpointing=bool(settings.checkpointing),
        seed=settings.seed,
        bf16=False,  # no autocast: the model is in BF16 itself, and its residual stream would become FP32
        use_cpu=not on_gpu,
        max_length=settings.seq if layout == "packed" else None,  # examples are cut already
        packing=layout == "packed",
        eval_packing=False,
        padding_free=layout == "padding-free",
        pad_to_multiple_of=16 if layout == "padded" and on_gpu else None,
        save_strategy="steps",
        save_total_limit=KEEP,
        logging_steps=settings.log_interval,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=on_gpu,
    )
    if settings.trains_fp32_shards:
        config.fsdp_plugin_args["mixed_precision_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    config._n_gpu = min(config.n_gpu, 1)  # one GPU, the model's; the Trainer would take all that it sees
    return config


def plan_steps(trainer: Trainer, settings: SFTSettings) -> int:
    """Set the steps of the run, its warm-up and its checkpoints, now that the number of rows is known."""
    args = trainer.args
    dataset: Any = trainer.train_dataset
    rows = len(dataset)
    per_epoch = math.ceil(rows / (settings.batch * settings.micro_batches))
    steps = settings.steps or math.ceil(per_epoch * settings.epochs)
    args.max_steps = steps
    args.warmup_steps = steps // 20 if settings.warmup is None else settings.warmup
    args.save_steps = args.eval_steps = settings.save_interval or max(math.ceil(steps / 10), min(steps, 10))
    return steps


def newest_checkpoint(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """Return the newest complete checkpoint of a run, and its record; remove those that were never finished."""
    newest: tuple[Path, dict[str, Any]] | None = None
    for path in (folder / CHECKPOINTS).glob("checkpoint-*"):
        try:
            record = json.loads((path / COMPLETE).read_bytes())
        except (OSError, ValueError):
            shutil.rmtree(path)
            continue
        if newest is None or record["step"] > newest[1]["step"]:
            newest = path, record
    return newest
