"""`octavo sft` on two ranks, by TRL's trainer: whole copies or shards; rank 0 writes and merges."""

import io
import json
import random
import shutil

import pytest
import torch
from decoder_cases import build
from ranks import on_ranks
from rich.console import Console
from runs import Forked, rows
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from trainer_cases import BYTES, byte_tokenizer

from octavo.sft import run
from octavo.sft.settings import settings_from_options

OPTIONS = ["--rank", "4", "--batch", "4", "--lr", "0.01", "--sample-tokens", "2", "--device", "cpu"]
OPTIONS += ["--save-interval", "2", "--merge", "fp8"]
WORDS = ["red", "green", "blue", "fox", "dog", "cat", "runs", "jumps", "over", "the", "lazy"]


@pytest.fixture
def request_for(tmp_path):
    """A tiny Llama on bytes, and examples."""
    build(vocab_size=BYTES, max_position_embeddings=96).bfloat16().save_pretrained(tmp_path / "llama")
    byte_tokenizer().save_pretrained(tmp_path / "llama")
    choose = random.Random(0)
    phrases = [" ".join(choose.choices(WORDS, k=choose.randint(1, 6))) for _ in range(32)]
    lines = [json.dumps({"prompt": f"{p} =", "completion": f" {p[::-1]}"}) + "\n" for p in phrases]
    (tmp_path / "pairs.jsonl").write_text("".join(lines))
    return [str(tmp_path / "llama"), str(tmp_path / "pairs.jsonl"), *OPTIONS]


def tune(world, folder, *arguments):
    codes, outputs, errors = Forked(world, *arguments, "--out", str(folder), command="sft").communicate()
    assert not any(codes), errors
    return outputs


def test_two_ranks_fine_tune_as_one(tmp_path, request_for):
    tune(1, tmp_path / "one", *request_for, "--steps", "4")
    outputs = tune(2, tmp_path / "two", *request_for, "--steps", "4")
    assert "Ranks: 2 by ddp, each with 1 × 2 rows of a step" in outputs[0] and outputs[1] == ""
    one, two = rows(tmp_path / "one"), rows(tmp_path / "two")
    assert [row["tokens"] for row in one] == [row["tokens"] for row in two]
    # The same examples; scales per channel of half as many tokens, and BF16 sums in another order.
    assert [row["loss"] for row in two] == pytest.approx([row["loss"] for row in one], rel=2e-3)
    assert {path.name for path in (tmp_path / "two").iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}
    newest = tmp_path / "two" / "checkpoints" / "checkpoint-4"
    assert all(
        (newest / name).exists() for name in ("octavo_scaling_0.pt", "octavo_scaling_1.pt", "octavo-complete.json")
    )
    outputs = tune(2, tmp_path / "two", "--resume", "--merge", "16bit")  # complete: the results are written anew
    assert "Resuming after step 4" in outputs[0] and rows(tmp_path / "two") == two
    shutil.rmtree(newest)  # as if it had been stopped after step 2
    outputs = tune(2, tmp_path / "two", "--resume")
    assert "Resuming after step 2" in outputs[0]
    assert [figures(row) for row in rows(tmp_path / "two")] == [figures(row) for row in two]
    outputs = tune(1, tmp_path / "two", "--resume")
    assert "Resuming on 1 rank what 2 ranks saved: the same steps, within rounding" in " ".join(outputs[0].split())


def tune_shards(rank, folder, resume, options):
    """`octavo sft --strategy fsdp2` where Accelerate is told that CPUs have FSDP2, too."""
    from accelerate import state
    from accelerate.utils import DistributedType

    init = state.AcceleratorState.__init__

    def with_shards(self, *args, fsdp_plugin=None, **kwargs):
        init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    state.AcceleratorState.__init__ = with_shards
    run.check_strategy = lambda _settings: None
    base = run.read_settings(folder) if resume else None
    output = io.StringIO()
    run.fine_tune(settings_from_options(options, base), out=folder, resume=resume, console=Console(file=output))
    return output.getvalue()


@pytest.mark.parametrize("options", [{"lr": 0.01, "merge": "fp8", "rank": 4}, {"lr": 0.001, "full": True}])
def test_shards_are_fine_tuned_as_whole_copies(tmp_path, request_for, options):
    model, data, *_ = request_for
    common = {"batch": 4, "steps": 4, "save_interval": 2, "sample_tokens": 2, "device": "cpu", "ranks": 2, **options}
    common |= {"model": model, "data": data}
    copies, shards = tmp_path / "copies", tmp_path / "shards"
    on_ranks(2, tune_shards, copies, False, common)
    outputs = on_ranks(2, tune_shards, shards, False, {**common, "strategy": "fsdp2"})
    assert "Ranks: 2 by fsdp2, each with 1 × 2 rows of a step" in outputs[0] and outputs[1] == ""
    expected, actual = rows(copies), rows(shards)
    assert [row["loss"] for row in actual] == pytest.approx([row["loss"] for row in expected], rel=2e-3)
    assert {path.name for path in shards.iterdir()} == {path.name for path in copies.iterdir()}
    for path in (path for name in ("adapter", "model") for path in (copies / name).glob("*.safetensors")):
        whole, gathered = load_file(path), load_file(shards / path.relative_to(copies))
        assert {name: (x.dtype, x.shape) for name, x in gathered.items()} == {
            name: (x.dtype, x.shape) for name, x in whole.items()
        }
    saved = FileSystemReader(shards / "checkpoints" / "checkpoint-4" / "pytorch_model_fsdp_0").read_metadata()
    trained = [x for name, x in saved.state_dict_metadata.items() if "full" in options or "lora_" in name]
    assert {x.properties.dtype for x in trained} == {torch.float32}  # of BF16 weights, these are the masters
    outputs = on_ranks(2, tune_shards, shards, True, {"ranks": 2})  # complete: the results are written anew
    assert "Resuming after step 4" in outputs[0] and rows(shards) == actual
    shutil.rmtree(shards / "checkpoints" / "checkpoint-4")  # as if it had been stopped after step 2
    outputs = on_ranks(2, tune_shards, shards, True, {"ranks": 2})
    assert "Resuming after step 2" in outputs[0]
    assert [figures(row) for row in rows(shards)] == [figures(row) for row in actual]


def test_shards_on_a_cpu_are_refused(tmp_path, request_for):
    codes, _, errors = Forked(
        2, *request_for, "--strategy", "fsdp2", "--out", str(tmp_path / "run"), command="sft"
    ).communicate()
    assert codes == [2, 2] and "--strategy fsdp2: Accelerate shards on GPUs alone" in errors[0]
    assert not (tmp_path / "run").exists()


def figures(row):
    return {name: value for name, value in row.items() if name != "tokens_per_s"}
