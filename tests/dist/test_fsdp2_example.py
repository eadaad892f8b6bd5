"""examples/fsdp2.py: it trains in shards, and goes on where it ended, on as many ranks or in one process."""

import importlib.util
from pathlib import Path

from ranks import on_ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"


def run(_rank, folder, steps):
    spec = importlib.util.spec_from_file_location("fsdp2", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example.main(Path(folder), steps, 2)


def test_it_goes_on_where_it_ended(tmp_path):
    whole = on_ranks(2, run, str(tmp_path / "whole"), 6)
    assert whole[0][-1] < whole[0][0]
    first = on_ranks(2, run, str(tmp_path / "parts"), 4)
    then = on_ranks(2, run, str(tmp_path / "parts"), 2)
    assert [a + b for a, b in zip(first, then, strict=True)] == whole
    [alone] = on_ranks(1, run, str(tmp_path / "parts"), 2)
    assert all(loss < whole[0][0] for loss in alone)
