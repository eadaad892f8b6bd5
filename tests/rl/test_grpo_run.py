"""Runs of `octavo grpo`: what they leave, resumed to the bit, and bad luck with the last checkpoint intact."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import peft
import pytest
import torch
from commands import Command
from decoder_cases import build
from rich.console import Console
from rl_cases import REWARDS
from safetensors.torch import load_file
from trainer_cases import BYTES, byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from octavo.grpo import demo, run
from octavo.grpo.run import read_settings, train_grpo
from octavo.grpo.settings import RunSettings, settings_from_options
from octavo.rl import vllm
from octavo.rl.engine import NativeEngine
from octavo.training.checkpoint import list_checkpoints
from octavo.training.errors import RunError, UserError
from octavo.training.files import read_object
from octavo.training.signals import Interrupted

OCTAVO = Path(sys.executable).with_name("octavo")
OPTIONS = {
    "rank": 4, "prompts": 2, "completions": 4, "max_new_tokens": 5, "lr": 1e-2, "steps": 4, "save_interval": 2,
    "device": "cpu", "beta": 0.01,
}  # fmt: skip
FLAGS = [str(part) for name, value in OPTIONS.items() for part in (f"--{name.replace('_', '-')}", value)]


def rewards_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["reward"], row["loss"], row["kl"], row["gap_mean"]) for row in rows]


def settings_of(model, prompts, rewards, **changes):
    options = {"model": model, "task": prompts, "rewards": rewards, **OPTIONS, **changes}
    if options.get("full"):
        del options["rank"]  # it would have no effect, and is refused
    return settings_from_options(options)


def test_the_command_killed_and_resumed_to_the_bit(byte_model, prompts, rewards, tmp_path):
    arguments = ["grpo", byte_model, prompts, "--rewards", rewards, *FLAGS, "--steps", "6"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    command = [OCTAVO, *arguments, "--out", str(whole)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert run.returncode == 0, run.stderr
    for words in ("GRPO of ", "6 prompts of prompts.jsonl; rewards: share", "step    1  reward ", "Report: ", "before"):
        assert words in run.stdout, run.stdout
    process = Command(*arguments, "--out", str(cut))
    while not list_checkpoints(cut) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert 2 <= len(rewards_of(cut)) < 6
    resumed = Command("grpo", "--resume", "--out", str(cut))
    output, error = resumed.communicate()
    assert resumed.returncode == 0 and "Resuming after step" in output, error
    assert rewards_of(cut) == rewards_of(whole)
    summaries = [read_object(folder / "summary.json", "")["fp8"] for folder in (whole, cut)]
    assert summaries[0]["reward_after"] == summaries[1]["reward_after"]
    page = (whole / "report.html").read_text()
    assert "Completions before and after" in page and "Groups all equal" in page and "say 0:" in page
    samples = read_object(whole / "samples.json", "")
    assert samples["prompts"] == 6 and {"prompt", "before", "after"} <= samples["samples"][0].keys()
    assert [path.name for path in list_checkpoints(whole)] == ["checkpoint-000004", "checkpoint-000006"]
    adapted = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(byte_model), whole / "adapter")
    assert any(p.abs().max() > 0 for name, p in adapted.named_parameters() if "lora_B" in name)


def test_ctrl_c_saves_and_says_how_to_go_on(byte_model, prompts, rewards, tmp_path):
    folder = tmp_path / "run"
    process = Command("grpo", byte_model, prompts, "--rewards", rewards, *FLAGS, "--steps", "500", "--out", str(folder))
    while not (folder / "metrics.jsonl").exists() or not rewards_of(folder):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate()
    assert process.returncode == 130 and f"Continue with: octavo grpo --resume --out {folder}" in output
    (checkpoint,) = list_checkpoints(folder)[-1:]
    assert int(checkpoint.name.removeprefix("checkpoint-")) == len(rewards_of(folder)) < 500


def test_the_small_run_a_little_shorter(tmp_path):
    """The run without arguments, with fewer steps of both kinds: its reward rises from below 0.5 to above 0.8."""
    folder = train_grpo(settings_from_options({"steps": 50, "device": "cpu"}), out=tmp_path / "run", warm_up=450)
    summary = read_object(folder / "summary.json", "")["fp8"]
    assert summary["reward_before"] < 0.5 and summary["reward_first"] < 0.5, summary
    assert summary["reward_after"] > 0.8 and summary["reward_last"] > 0.8, summary
    assert summary["gap_mean"] < 1e-3 and summary["equal_groups"] > 0
    assert read_object(folder / "config.json", "")["recipe"] == "block" and (folder / "base" / "config.json").exists()


def test_the_small_run_killed_while_its_model_is_made(tmp_path, monkeypatch):
    """It is resumed, and all that it samples is as in a run that was not interrupted."""
    settings = settings_from_options({"steps": 2, "prompts": 2, "completions": 2, "device": "cpu"})
    whole = train_grpo(settings, out=tmp_path / "whole", warm_up=3)
    made = demo.make_base

    def killed(folder, *_, **__):
        folder.with_name("base.tmp").mkdir()  # as a kill would leave it
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setattr(demo, "make_base", killed)
    words = io.StringIO()
    with pytest.raises(Interrupted):
        train_grpo(settings, out=tmp_path / "run", warm_up=3, console=Console(file=words, width=500))
    assert f"no checkpoint was written yet. Continue with: octavo grpo --resume --out {tmp_path}" in words.getvalue()
    assert read_settings(tmp_path / "run") == settings
    monkeypatch.setattr(demo, "make_base", made)
    train_grpo(settings, out=tmp_path / "run", resume=True, warm_up=3)
    assert rewards_of(tmp_path / "run") == rewards_of(whole)


def test_the_small_model_depends_on_its_seed_alone(tmp_path):
    losses = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        torch.manual_seed(hash(name) % 1000)
        seen = losses[name] = []
        demo.make_base(tmp_path / name, seed, steps=3, progress=lambda _, loss, seen=seen: seen.append(loss))
    assert losses["a"] == losses["b"] != losses["c"]
    assert demo.sorts(["4172>", "11>"], ["1247", "12"]) == [1.0, 0.0]


BROKEN = {
    "raises": ("raise KeyError('answer')", "reward function share raised KeyError: 'answer' (rewards.py:"),
    "wrong length": ("return [1.0]", "returned 1 rewards for 8 completions"),
    "exits": ("raise SystemExit(3)", "reward function share raised SystemExit: 3 (rewards.py:"),
    "None": ("return None", "returned None"),
    "all None": ("return [None] * len(completions)", "no completion has a reward"),
    "all NaN": ("return [float('nan')] * len(completions)", "no completion has a reward"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_reward_function_that_fails_and_is_mended(how, byte_model, prompts, rewards, tmp_path):
    """In step 4 (the fifth call: one was before the first step). What is mended goes on as if nothing had happened."""
    body, words = BROKEN[how]
    settings = settings_of(byte_model, prompts, rewards)
    failing = f"    calls.append(1)\n    if len(calls) == 5:\n        {body}\n    return"
    Path(rewards).write_text("calls = []\n" + REWARDS.replace("    return", failing))
    with pytest.raises(RunError) as caught:
        train_grpo(settings, out=tmp_path / "run")
    message = str(caught.value)
    assert words in message and "checkpoint-000002 is intact" in message and "\n" not in message, message
    if how == "raises":
        Path(rewards).write_text(REWARDS)
        train_grpo(settings, out=tmp_path / "run", resume=True)
        train_grpo(settings, out=tmp_path / "whole")
        assert rewards_of(tmp_path / "run") == rewards_of(tmp_path / "whole")


def test_an_engine_that_dies(byte_model, prompts, rewards, tmp_path, monkeypatch):
    original, calls = NativeEngine.generate, []

    def dying(self, *args):
        calls.append(1)
        if len(calls) == 5:
            raise ConnectionError("the process is gone\nand more")
        return original(self, *args)

    monkeypatch.setattr(NativeEngine, "generate", dying)
    words = "the native engine failed at step 4: ConnectionError: the process is gone; .*checkpoint-000002 is intact"
    with pytest.raises(RunError, match=words):
        train_grpo(settings_of(byte_model, prompts, rewards), out=tmp_path / "run")


def test_a_cache_that_does_not_fit(byte_model, prompts, rewards, tmp_path, monkeypatch):
    monkeypatch.setattr("octavo.rl.engine._room", lambda *_: 1000)
    with pytest.raises(RunError, match=r"the native engine failed at step 0: ValueError: a cache of .* takes .* GiB"):
        train_grpo(settings_of(byte_model, prompts, rewards), out=tmp_path / "run")


def test_prompts_that_are_too_long(byte_model, rewards, tmp_path, capsys):
    path = tmp_path / "long.jsonl"
    path.write_text("".join(json.dumps({"prompt": "x" * n}) + "\n" for n in (5, 27, 28, 400)))
    folder = train_grpo(settings_of(byte_model, str(path), rewards, steps=1), out=tmp_path / "run")
    assert "2 prompts of more than 27 tokens are left out" in capsys.readouterr().out
    assert read_object(folder / "summary.json", "")["fp8"]["prompts_too_long"] == 2
    path.write_text('{"prompt": "' + "x" * 30 + '"}\n')
    with pytest.raises(UserError, match="every prompt has more than 27 tokens"):
        train_grpo(settings_of(byte_model, str(path), rewards), out=tmp_path / "other")
    with pytest.raises(UserError, match="max_new_tokens=64: the model has 32 positions"):
        train_grpo(settings_of(byte_model, str(path), rewards, max_new_tokens=64), out=tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_no_end_of_text(prompts, rewards, tmp_path):
    folder = tmp_path / "model"
    build(vocab_size=BYTES, max_position_embeddings=32, eos_token_id=None).bfloat16().save_pretrained(folder)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match=r"no end of text \(eos_token_id\): every completion .* --stop TEXT"):
        train_grpo(settings_of(str(folder), prompts, rewards), out=tmp_path / "run")
    train_grpo(settings_of(str(folder), prompts, rewards, stop="a", steps=1), out=tmp_path / "run")
    flags = [*FLAGS, "--steps", "2", "--stop", "a", "--stop", "b"]
    out = ["--out", str(tmp_path / "two")]
    for arguments in (["grpo", str(folder), prompts, "--rewards", rewards, *flags], ["grpo", "--resume"]):
        process = Command(*arguments, *out)
        _, error = process.communicate()
        assert process.returncode == 0, error
    assert read_settings(tmp_path / "two").stop == ["a", "b"]


@pytest.mark.parametrize("content", ['{"model_type": "llama", "hidden_size": 65, "num_attention_heads": 4}', "[]", "{"])
def test_a_configuration_that_is_not_valid(content, byte_model, prompts, rewards, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(byte_model, folder)
    (folder / "config.json").write_text(content)
    with pytest.raises(UserError, match=rf"^MODEL {folder} cannot be trained: .*config.json.*") as caught:
        train_grpo(settings_of(str(folder), prompts, rewards), out=tmp_path / "run")
    assert "\n" not in str(caught.value) and not (tmp_path / "run").exists()


def test_found_before_prompts_are_made(byte_model, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm, "is_installed", lambda: False)
    monkeypatch.setattr(run, "read_task", None)
    settings = settings_from_options({"model": byte_model, "task": "chain_sum", "engine": "vllm"})
    with pytest.raises(UserError, match="vLLM is not installed"):
        train_grpo(settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_of_another_model(prompts, rewards, tmp_path):
    folder = tmp_path / "model"
    build(vocab_size=200, max_position_embeddings=32, eos_token_id=1).bfloat16().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    with pytest.raises(UserError, match="tokenizer has 258 tokens and the model embeddings for 200"):
        train_grpo(settings_of(str(folder), prompts, rewards), out=tmp_path / "run")


@pytest.mark.parametrize(
    "changes",
    [
        {"full": True, "beta": 0.0, "lr": 1e-3},
        {"full": True, "beta": 0.0, "precision": "bf16", "optimizer": "adamw"},
        {"precision": "bf16", "checkpointing": True},
        {"products": "fp8", "kv_dtype": "fp8", "standby": True, "correction": "mis", "correction_level": "sequence"},
        {"products": "weights-only", "recipe": "block", "loss_type": "grpo", "mini_batches": 2, "iterations": 2},
    ],
    ids=["full fp8", "full bf16", "lora bf16", "fp8 products", "weights-only"],
)
def test_what_can_be_trained(changes, byte_model, prompts, rewards, tmp_path):
    options = {"steps": 3, "save_interval": 1, **changes}
    folder = train_grpo(settings_of(byte_model, prompts, rewards, **options), out=tmp_path / "run")
    assert len(rewards_of(folder)) == 3 and (folder / ("model" if changes.get("full") else "adapter")).is_dir()
    rewards_before = rewards_of(folder)
    for path in list_checkpoints(folder)[1:]:  # as if the last step had not been saved
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    train_grpo(settings_of(byte_model, prompts, rewards, **options), out=folder, resume=True)
    assert rewards_of(folder) == rewards_before


def test_resuming_with_other_numbers_is_refused(byte_model, prompts, rewards, tmp_path):
    folder = train_grpo(settings_of(byte_model, prompts, rewards, steps=2), out=tmp_path / "run")
    with pytest.raises(UserError, match=r"cannot resume .* with beta=0.5: it was started with 0.01"):
        train_grpo(settings_of(byte_model, prompts, rewards, steps=2, beta=0.5), out=folder, resume=True)


def test_what_is_wrong_is_found_before_prompts_are_made(byte_model, prompts, rewards, tmp_path, monkeypatch):
    """Some tasks take minutes to make them."""
    folder = train_grpo(settings_of(byte_model, prompts, rewards, steps=1), out=tmp_path / "run")
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "nonesuch"}')
    untold = tmp_path / "untold"
    AutoConfig.from_pretrained(byte_model).save_pretrained(untold)
    monkeypatch.setattr("octavo.grpo.run.read_task", lambda *_, **__: pytest.fail("prompts were made"))
    for changes, how, words in (
        ({"model": str(tmp_path / "none")}, {}, "MODEL .*there is no such folder"),
        ({"model": str(unknown)}, {}, "MODEL .* cannot be trained: .*nonesuch"),
        ({"model": str(untold)}, {}, "MODEL .* no tokenizer that loads"),
        ({"model": "x" * 300}, {}, "MODEL x.* cannot be trained: .*File name too long"),
        ({}, {"out": folder}, "already holds a run"),
        ({"steps": 1, "beta": 0.5}, {"out": folder, "resume": True}, "beta=0.5: it was started with 0.01"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            train_grpo(settings_of(**{"model": byte_model, "prompts": prompts, "rewards": rewards, **changes}), **how)
        assert "\n" not in str(caught.value)


def test_adapters_are_a_model_to_start_from(byte_model, prompts, rewards, tmp_path, monkeypatch):
    folder = train_grpo(settings_of(byte_model, prompts, rewards, steps=1), out=tmp_path / "run") / "adapter"
    assert any(x.any() for name, x in load_file(folder / "adapter_model.safetensors").items() if "lora_B" in name)
    monkeypatch.setattr(run, "read_task", None)  # all of this is found before prompts are made
    for changes, words in (
        ({}, "beta=0.01 with MODEL .*: the reference would be the model without its adapters"),
        ({"beta": 0.0, "alpha": 1.0}, "alpha=1.0 with MODEL .*: its adapters have 4; give --alpha 4"),
        ({"beta": 0.0, "full": True}, "full=True with MODEL .*: these are adapters; leave --full out"),
        ({"beta": 0.0, "rank": 8}, "rank=8 with MODEL .*: its adapters have 4; give --rank 4"),
    ):
        with pytest.raises(UserError, match=words):
            train_grpo(settings_of(str(folder), prompts, rewards, **changes), out=tmp_path / "none")
    monkeypatch.undo()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"lora_dropout": 0.5}))
    options = {"model": str(folder), "task": prompts, "rewards": rewards, **OPTIONS}
    del options["rank"]
    own = settings_from_options(options | {"device": "cpu"})
    assert (own.rank, own.alpha) == (4, 4)  # those of the adapters
    settings = settings_of(str(folder), prompts, rewards, steps=1, lr=1e-12, beta=0.0)
    after = train_grpo(settings, out=tmp_path / "next") / "adapter"
    row = json.loads((tmp_path / "next" / "metrics.jsonl").read_text())
    assert row["gap_mean"] < 1e-3  # a rollout drops nothing, nor does the trainer, whatever adapters were made with
    before, after = (load_file(x / "adapter_model.safetensors") for x in (folder, after))
    assert before.keys() == after.keys() and all(torch.allclose(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "sglang"}, "engine='sglang': choose one of native, vllm"),
        ({"recipe": "tensor"}, "recipe='tensor': choose one of channel, block"),
        ({"full": True, "beta": 0.1}, "beta=0.1 with full=True: the reference is the model without adapters"),
        ({"products": "bf16"}, "products='bf16': choose one of fp8, weights-only, fp8-dgrad"),
        (
            {"full": True, "rank": 4},
            "rank=4 would have no effect with full=True: .*; leave it out",
        ),
        ({"precision": "bf16", "products": "fp8"}, "products='fp8' would have no effect with precision='bf16'"),
        (
            {"correction": "none", "correction_max": 3.0},
            "correction_max=3.0 would have no effect with correc",
        ),
        (
            {"correction": "none", "correction_min": 0.5},
            "correction_min=0.5 would have no effect with correction='none'",
        ),
        ({"seed": 2**63}, r"seed=9223372036854775808: a whole number, 0 or more, below 2\*\*63"),
        ({"engine": "vllm", "kv_dtype": "fp8"}, "kv_dtype='fp8' with engine='vllm'"),
    ],
)
def test_settings_are_checked(options, words):
    with pytest.raises(ValueError, match=words):
        settings_from_options({"model": "m", "task": "t", **options})
    assert settings_from_options({"engine": "auto"}).engine in ("native", "vllm")
    assert RunSettings.from_dict(settings_from_options({}).to_dict()) == settings_from_options({})


def test_the_command_says_what_is_missing(byte_model, tmp_path):
    for arguments, words in (
        (["model"], "give MODEL and TASK, or neither"),
        (["--rewards", "f.py"], "--rewards without TASK"),
        (["--resume", "--overwrite"], "give one of them"),
        (["m", "p.jsonl", "--completions", "1"], "completions=1: at least 2"),
        ([byte_model, str(tmp_path / "none.jsonl")], "No such file"),
        ([byte_model, ""], "TASK '': no name in it"),
    ):
        process = Command("grpo", *arguments)
        _, error = process.communicate()
        assert process.returncode == 2 and words in error and error.count("\n") == 1, error
