"""benchmarks/offload.py, on a CPU: every way trains, and says what it took."""

import json
import runpy
from pathlib import Path

import pytest

pytest.importorskip("transformers")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "offload.py"


@pytest.mark.parametrize("how", ["bf16", "plain", "released", "optimizer", "master"])
def test_every_way_trains(how, tmp_path):
    out = tmp_path / "found.json"
    script = runpy.run_path(str(SCRIPT))
    sizes = ["--preset", "tiny", "--batch", "2", "--sequence", "32", "--warm", "1", "--steps", "2", "--eager"]
    script["main"]([*sizes, "--how", how, "--optimizer", "adamw", "--out", str(out)])
    found = json.loads(out.read_text())
    assert found["how"] == how and found["ms"] > 0 and len(found["losses"]) == 3
    assert found["losses"][2] == pytest.approx(found["losses"][0], rel=0.01)  # at a learning rate of 1e-5
