"""`torch.use_deterministic_algorithms(True)`: two runs have the same bits, attention and adapters included."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import hashlib, json, sys
import torch
import octavo
from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.shapes import LLAMAS, Case

torch.use_deterministic_algorithms(True)
shape = {**LLAMAS["tiny"], "hidden_size": 1024, "intermediate_size": 2816, "head_dim": 128, "vocab_size": 512,
         "num_attention_heads": 8, "num_key_value_heads": 2}


def digest(recipe, rank):
    case = Case("small", shape, 2, 8192, 2048, 0, "cuda", frozen=rank > 0, rank=rank)
    prepared = PreparedModel(case, Contender("octavo", "octavo", False, recipe))
    trained = [p for p in prepared.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    sum = hashlib.sha256()
    for _ in range(12):
        loss = prepared.model(**prepared.inputs, use_cache=False).loss
        loss.backward()
        for parameter in trained:
            sum.update(parameter.grad.cpu().view(torch.uint8).numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    return sum.hexdigest()


print(json.dumps([digest(sys.argv[1], int(sys.argv[2])) for _ in range(2)]))
"""


@pytest.mark.parametrize(("recipe", "rank"), [("delayed", 0), ("block", 0), ("channel", 16), ("block", 80)])
def test_two_runs_have_the_same_bits(recipe, rank):
    command = [sys.executable, "-c", SCRIPT, recipe, str(rank)]
    root = str(Path(__file__).parents[2])
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": root}
    output = subprocess.run(command, env=env, capture_output=True, text=True)
    assert output.returncode == 0, output.stderr
    first, second = json.loads(output.stdout.splitlines()[-1])
    assert first == second
