"""The loading experiment on the tiny preset: the whole path that the GPU sitting takes, once with its processes."""

import json
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytest.importorskip("transformers")
pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def _scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_loaded_trains(tmp_path, tmp_path_factory, monkeypatch, fresh):
    import load

    def in_this_process(task, folder, options):
        if task == "write":
            return load.write_checkpoint(folder, options.preset, options.device)
        return load.load_and_train(folder, task, options.device)

    if not fresh:
        monkeypatch.setattr(load, "in_a_fresh_process", in_this_process)
    out = tmp_path / "load.json"
    load.main(f"--preset tiny --device cpu --ways channel --folder {tmp_path} --out {out}".split())
    assert list(tmp_path.iterdir()) == [out]  # the checkpoint is gone
    result = json.loads(out.read_text())
    assert str(tmp_path) not in out.read_text() and result["command"].startswith("python benchmarks/load.py --preset")
    assert result["versions"]["torch"] == torch.__version__ and len(result["date"]) == 10
    checkpoint = result["checkpoint"]
    assert checkpoint["bytes"] == 2 * checkpoint["parameters"]
    (channel,) = result["rows"]
    folder = tmp_path_factory.mktemp("again")
    load.write_checkpoint(folder, "tiny", "cpu")
    bf16 = load.load_and_train(folder, "bf16", "cpu")
    assert bf16["weights_bytes"] == checkpoint["bytes"]
    linears, outputs = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128), 2 * (128 + 64 + 2 * 128 + 64)
    assert channel["weights_bytes"] == checkpoint["bytes"] - linears + 4 * outputs  # FP8, and a scale for each output
    for row in (bf16, channel):
        loading, training = row["loading"], row["training"]
        assert loading["seconds"] > 0 and loading["host_peak"] > loading["host_own"] > 0
        assert training["adapters_moved"] == training["adapters"] == 2 * 7 * 2
    assert channel["training"]["losses"] == pytest.approx(bf16["training"]["losses"], rel=0.01)
    assert channel["training"]["losses"] != bf16["training"]["losses"]


def test_a_checkpoint_in_shards_is_read_as_one(tmp_path):
    import load
    from transformers import AutoModelForCausalLM

    about = load.write_checkpoint(tmp_path, "tiny", "cpu", limit=60_000)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == about["shards"] > 2 and all(file.stat().st_size < 70_000 for file in files)
    model, actual = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not actual["missing_keys"] and not actual["unexpected_keys"]
    assert sum(p.numel() for p in model.parameters()) == about["parameters"]
    assert model.model.norm.weight.eq(1).all() and 0.019 < model.lm_head.weight.float().std() < 0.021


def test_shards_of_8b_are_of_2_gb_at_most():
    import load

    _, shapes = load.tensors_of("8b")
    files = list(load.shards(shapes, load.SHARD_BYTES))
    assert [name for names in files for name in names] == list(shapes)
    sizes = [sum(2 * shapes[name].numel() for name in names) for names in files]
    assert max(sizes) <= load.SHARD_BYTES and sum(sizes) == pytest.approx(16.06e9, rel=0.001)


def test_no_room_and_no_such_way(capsys):
    import load

    with pytest.raises(SystemExit, match="no room for 9000000000"):
        load.choose_folder(9 * 10**18)
    with pytest.raises(SystemExit):
        load.main(["--preset", "tiny", "--ways", "block,int8"])
    assert "ways='int8'" in capsys.readouterr().err
