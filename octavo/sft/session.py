"""The training of a run in its folder, and what it leaves there.

octavo-run.json     the marker, as in a run of `octavo train`; locked while a process trains
config.json         the settings, complete, with facts about the data and this machine
metrics.jsonl       one line per step
checkpoints/        the newest two, as transformers' Trainer writes them
adapter/            the adapters, as PEFT writes them
model/              the whole model: with `full`, or with `merge`
products.json, sample.json, summary.json, report.html
"""

import platform
import statistics
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
import trl
from transformers.trainer_callback import TrainerState
from transformers.trainer_utils import IntervalStrategy

from octavo.dist.together import from_first, rank
from octavo.dist.whole import has_shards
from octavo.hf.callback import OctavoCallback
from octavo.hf.export import save_merged
from octavo.nn.report import REPORT as MODEL_REPORT
from octavo.optim.step_memory import measure_memory
from octavo.sft.display import Display
from octavo.sft.examples import IGNORED, Data
from octavo.sft.settings import SFTSettings
from octavo.sft.trainer import Figures, Trainer, newest_checkpoint, plan_steps, training_arguments
from octavo.support import check_fp8_support
from octavo.tools.html_report import write_report
from octavo.training.errors import RunError
from octavo.training.files import disk_errors, write_json
from octavo.training.run_folder import (
    ADAPTER,
    CONFIG,
    METRICS,
    PRODUCTS,
    SAMPLE,
    SUMMARY,
    WHOLE_MODEL,
    Metrics,
    read_summary,
)
from octavo.training.several_ranks import saved_by_others
from octavo.training.signals import StopSignals

LONGEST_PROMPT = 512  # tokens of a sample's prompt


class Session:
    """One run: its trainer, its folder, and how far it has come."""

    def __init__(
        self,
        folder: Path,
        settings: SFTSettings,
        data: Data,
        model: Any,
        tokenizer: Any,
        display: Display,
        stop: StopSignals,
    ) -> None:
        self.folder, self.settings, self.data = folder, settings, data
        self.tokenizer, self.display, self.stop = tokenizer, display, stop
        self.checkpoint = from_first(newest_checkpoint(folder) if rank() == 0 else None)
        self.metrics = Metrics(folder / METRICS, writes=rank() == 0)
        self.figures = Figures(self.metrics, stop, settings.log_interval, display)
        arguments = training_arguments(settings, folder)
        if data.held_out is not None:
            arguments.eval_strategy = IntervalStrategy.STEPS
            arguments.eval_on_start = self.checkpoint is None
        self.model = model
        self.trainer = self.figures.trainer = Trainer(
            model,
            arguments,
            train_dataset=data.train.dataset(),
            eval_dataset=None if data.held_out is None else data.held_out.dataset(),
            processing_class=tokenizer,
            callbacks=[OctavoCallback(hints=False), self.figures],
        )
        self.steps = plan_steps(self.trainer, settings)

    def train(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step."""
        done = 0 if self.checkpoint is None else int(self.checkpoint[1]["step"])
        self.metrics.keep(done)
        if rank() == 0:
            self._write_config()
        settings, display = self.settings, self.display
        display.say(
            f"Steps: {self.steps:,} of {settings.micro_batches} × {settings.batch} rows, {settings.layout}, at most "
            f"{settings.seq:,} tokens an example, peak rate {settings.lr:g}; output: {self.folder}",
            "dim",
        )
        if settings.ranks > 1:
            share = f"{settings.own_micro_batches} × {settings.own_batch} rows of a step"
            display.say(f"Ranks: {settings.ranks} by {settings.strategy}, each with {share}", "dim")
        if self.checkpoint is not None:
            if (saved_by := self.checkpoint[1].get("ranks", settings.ranks)) != settings.ranks:
                display.say(saved_by_others(saved_by))
            display.say(f"Resuming after step {done:,}", "bold")
            self.figures.tokens = int(self.checkpoint[1]["tokens"])
        if self.checkpoint is not None and done >= self.steps:
            self._load_result(self.checkpoint[0])
        else:
            self._take_steps(done)

    def _take_steps(self, done: int) -> None:
        settings = self.settings
        if settings.device == "cuda":
            torch.cuda.reset_peak_memory_stats()  # loading has a peak of its own
        try:
            with self.stop.deferred(), self.display.training(self.steps, done, settings.precision):
                self.trainer.train(resume_from_checkpoint=None if self.checkpoint is None else str(self.checkpoint[0]))
                self.stop.raise_if_requested()
        except torch.OutOfMemoryError as error:
            half = f"--batch {settings.batch // 2} --micro-batches {2 * settings.micro_batches}"
            way = half if settings.batch > 1 else "a smaller --seq"
            raise RunError(f"{error}\nIn a new run, {way} takes less memory, and so does --checkpointing") from error

    def finish(self) -> None:
        """Write what the run has led to. Of a sharded model, all ranks take part in what reads its weights."""
        held_out = self._held_out()
        if rank() and not has_shards(self.model):
            return
        result = None if rank() else self._result(held_out)
        self._save_model()
        sample = self._sample()
        if result is None:
            return
        if (report := getattr(self.model, MODEL_REPORT, None)) is not None:
            write_json(self.folder / PRODUCTS, report.to_dict())
        if sample is not None:
            write_json(self.folder / SAMPLE, sample)
            self.display.sample(sample)
        write_json(self.folder / SUMMARY, {self.settings.precision: result})
        self.display.results(result)
        with disk_errors(self.folder):
            report = write_report(self.folder)
        for words, name in (("Adapters", ADAPTER), ("Model", WHOLE_MODEL)):
            if (self.folder / name).is_dir():
                self.display.say(f"{words}: {self.folder / name}", "bold")
        self.display.say(f"Report: {report}", "bold")

    def _load_result(self, checkpoint: Path) -> None:
        """Load the weights of a run that is complete: the Trainer would take a step more."""
        self.trainer._load_from_checkpoint(str(checkpoint))
        self.trainer.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))

    def _write_config(self) -> None:
        settings = self.settings
        facts = {
            "command": "sft",
            "name": self.folder.resolve().name,
            **settings.to_dict(),
            "steps": self.steps,
            "emulated": settings.precision == "fp8" and not check_fp8_support(settings.device),
            "data_found": str(self.data),
            "data_sha256": self.data.train.digest,
            "versions": {
                "python": platform.python_version(),
                **{module.__name__: str(module.__version__) for module in (torch, transformers, peft, trl)},
            },
        }
        if settings.model is None:
            facts["base"] = "SmolLM2-135M-Instruct from Q4_1"
        write_json(self.folder / CONFIG, facts)

    def _save_model(self) -> None:
        model, settings = self.model, self.settings
        with disk_errors(self.folder):
            if not settings.full:
                save_merged(model, self.folder / ADAPTER, "lora", tokenizer=self.tokenizer)
            if settings.full or settings.merge:
                method = f"merged_{settings.merge or '16bit'}"
                folder, dtype = self.folder / WHOLE_MODEL, torch.bfloat16 if settings.trains_fp32_shards else None
                save_merged(model, folder, method, tokenizer=self.tokenizer, dtype=dtype)

    def _held_out(self) -> dict[int, float]:
        """Return held-out losses by step, the last step's among them; all ranks evaluate."""
        held_out = {
            int(entry["step"]): float(entry["eval_loss"])
            for entry in self.trainer.state.log_history
            if "eval_loss" in entry
        }
        if self.data.held_out is not None and self.steps not in held_out:
            held_out[self.steps] = float(self.trainer.evaluate()["eval_loss"])
        return held_out

    def _result(self, held_out: dict[int, float]) -> dict[str, Any]:
        """Return the figures of `summary.json`."""
        rows = self.metrics.rows()
        losses = [row["loss"] for row in rows[-max(len(rows) // 10, 1) :]]
        return {
            "final_loss": statistics.fmean(losses),
            **({} if self.data.held_out is None else {"held_out_loss": held_out[self.steps]}),
            "held_out_loss_before": held_out.get(0),
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rows),
            "skipped": 0,
            "memory": self._memory(),
        }

    def _memory(self) -> dict[str, Any] | None:
        """Return the memory of a step; where none was taken, what was measured before."""
        optimizer = self.trainer.optimizer
        if optimizer is not None:
            return measure_memory(self.model, getattr(optimizer, "optimizer", optimizer)).to_dict()
        if not (self.folder / SUMMARY).exists():
            return None
        earlier: dict[str, Any] | None = read_summary(self.folder)[self.settings.precision]["memory"]
        return earlier

    def _sample(self) -> dict[str, str] | None:
        """Return a held-out prompt and what the model writes after it, word by word the likeliest."""
        held_out = self.data.held_out
        if held_out is None or not self.settings.sample_tokens:
            return None
        example = held_out.examples[0]
        predicted = (example.labels != IGNORED).nonzero()[0]
        start = int(predicted[0]) or max(len(example.input_ids) // 2, 1)  # all is predicted: continue the first half
        prompt = torch.from_numpy(example.input_ids[:start][-LONGEST_PROMPT:]).long()[None]
        model = self.model.eval()
        prompt = prompt.to(next(model.parameters()).device)
        with torch.no_grad():
            written = model.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=self.settings.sample_tokens,
                do_sample=False,
                synced_gpus=has_shards(model),
            )
        decode = self.tokenizer.decode
        return {"prompt": decode(prompt[0]), "written": decode(written[0, prompt.shape[1] :], skip_special_tokens=True)}
