"""The training of a run in its folder, and what it leaves there.

octavo-run.json     the marker, as in a run of `octavo train`; locked while a process trains
config.json         the settings, complete, with facts about the task and this machine
base/               of a run without arguments: the small decoder it starts from
made-prompts.jsonl  of a task that makes its prompts
metrics.jsonl       one line per step: reward, KL, lengths, gap, speed
checkpoint-000020/  the newest two: trained weights, optimiser, random states
adapter/ or model/  the trained adapters, or the whole model
samples.json        prompts with completions from before and after
products.json, summary.json, report.html
"""

import math
import platform
import statistics
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from octavo.grpo.display import Display
from octavo.grpo.settings import RunSettings
from octavo.hf.export import save_merged
from octavo.nn.report import REPORT as MODEL_REPORT
from octavo.rl.grpo import GRPO
from octavo.support import check_fp8_support
from octavo.tools.rl_report import write_rl_report
from octavo.training.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from octavo.training.files import disk_errors, read_object, write_json
from octavo.training.run_folder import ADAPTER, CONFIG, METRICS, PRODUCTS, SAMPLES, SUMMARY, WHOLE_MODEL, Metrics
from octavo.training.signals import StopSignals

SHOWN = 8  # prompts whose completions are shown


class Session:
    """One run: its loop, its folder, and how far it has come."""

    def __init__(
        self,
        folder: Path,
        settings: RunSettings,
        grpo: GRPO,
        facts: dict[str, Any],
        display: Display,
        stop: StopSignals,
    ) -> None:
        self.folder, self.settings, self.grpo = folder, settings, grpo
        self.facts, self.display, self.stop = facts, display, stop
        self.metrics = Metrics(folder / METRICS)

    def train(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step."""
        settings, display = self.settings, self.display
        done = self._resume()
        write_config(self.folder, settings, self.facts)
        if done == 0:
            self._write_samples("before")
        with self.stop.deferred(), display.bar(f"GRPO, {settings.precision}", settings.steps, done):
            for number in range(done + 1, settings.steps + 1):
                row, _ = self.grpo.step(number)
                self.metrics.append(row)
                display.step(row, number == 1 or number % settings.log_interval == 0 or number == settings.steps)
                if number % settings.saves_every == 0 or number == settings.steps or self.stop.requested:
                    self._save(number)
                self.stop.raise_if_requested()

    def _resume(self) -> int:
        """Load the newest checkpoint; return its step, 0 if there is none."""
        checkpoints = list_checkpoints(self.folder)
        if not checkpoints:
            self.metrics.cut_back(0)
            return 0
        trained, state = load_checkpoint(checkpoints[-1], self.grpo.learner.device)
        self.grpo.load_state_dict(trained, state)
        done = int(state["step"])
        self.metrics.cut_back(done)
        self.display.say(f"Resuming after step {done:,}", "bold")
        return done

    def _save(self, number: int) -> None:
        self.metrics.sync()  # a checkpoint must not be newer than the rows that it continues
        save_checkpoint(self.folder, number, self.grpo.trained(), {**self.grpo.state_dict(), "step": number})

    def finish(self) -> None:
        """Write what the run has led to."""
        self._write_samples("after")
        self._save_model()
        samples = read_object(self.folder / SAMPLES, "start anew in another --out")
        result = {"reward_before": samples["before"], "reward_after": samples["after"], **self._result()}
        write_json(self.folder / SUMMARY, {self.settings.precision: result})
        self.display.samples(samples["samples"])
        self.display.results(result)
        with disk_errors(self.folder):
            report = write_rl_report(self.folder)
        where = self.folder / (WHOLE_MODEL if self.settings.full else ADAPTER)
        self.display.say(f"{'Model' if self.settings.full else 'Adapters'}: {where}", "bold")
        self.display.say(f"Report: {report}", "bold")

    def _write_samples(self, when: str) -> None:
        """Complete the task's first prompts once each, sampled with one seed before and after; write their rewards."""
        grpo, path = self.grpo, self.folder / SAMPLES
        prompts = grpo.prompts.all[: self.settings.prompts * self.settings.completions]
        completions = grpo.complete([prompt.ids for prompt in prompts], 1, step=0)
        texts = [grpo.tokenizer.decode(each.tokens, skip_special_tokens=True) for each in completions]
        scores = grpo.score([prompt.row for prompt in prompts], texts, completions)
        written: dict[str, Any] = {
            "prompts": len(prompts),
            "samples": [{"prompt": prompt.text} for prompt in prompts[:SHOWN]],
        }
        if when == "after":
            written = read_object(path, "start anew in another --out")
        known = scores.rewards[scores.rewards.isfinite()]
        written[when] = float(known.mean())
        for sample, text, reward in zip(written["samples"], texts, scores.rewards.tolist(), strict=False):
            sample[when] = {"text": text, "reward": None if math.isnan(reward) else reward}
        write_json(path, written)

    def _save_model(self) -> None:
        model, tokenizer = self.grpo.model, self.grpo.tokenizer
        if (report := getattr(model, MODEL_REPORT, None)) is not None:
            write_json(self.folder / PRODUCTS, report.to_dict())
        with disk_errors(self.folder):
            if self.settings.full:
                save_merged(model, self.folder / WHOLE_MODEL, "merged_16bit", tokenizer=tokenizer)
            else:
                model.save_pretrained(str(self.folder / ADAPTER))
                tokenizer.save_pretrained(str(self.folder / ADAPTER))

    def _result(self) -> dict[str, Any]:
        """Return the figures of `summary.json`: of the first step, means of the last tenth, medians of speed."""
        rows = self.metrics.rows()
        tenth = max(len(rows) // 10, 1)

        def mean(name: str, part: list[dict[str, Any]]) -> float:
            return statistics.fmean(row[name] for row in part)

        return {
            "reward_first": rows[0]["reward"],
            "reward_last": mean("reward", rows[-tenth:]),
            **{name: mean(name, rows) for name in ("gap_mean", "gap_p99", "gap_k3", "gap_exp", "gap_clip")},
            "equal_groups": sum(row["equal_groups"] for row in rows),
            "groups": sum(row["groups"] for row in rows),
            "unscored": sum(row["unscored"] for row in rows),
            "prompts_too_long": self.grpo.prompts.too_long,
            "tokens": rows[-1]["tokens"],
            **{name: statistics.median(row[name] for row in rows) for name in ("tokens_per_s", *_SPEEDS)},
        }


def write_config(folder: Path, settings: RunSettings, facts: dict[str, Any]) -> None:
    """Write the settings of a run, with facts about its task and this machine: from then on it can be resumed."""
    versions = {module.__name__: str(module.__version__) for module in (torch, transformers, peft)}
    config = {
        "command": "grpo",
        "name": folder.resolve().name,
        **settings.to_dict(),
        "emulated": settings.precision == "fp8" and not check_fp8_support(settings.device),
        **facts,
        "versions": {"python": platform.python_version(), **versions},
    }
    write_json(folder / CONFIG, config)


_SPEEDS = ("rollout_tokens_per_s", "train_tokens_per_s")
