"""The rooms of the library: who may import whom, what importing it does, and its public names."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import octavo

ROOT = Path(octavo.__file__).parent
# A room may import from the rooms before it. `tracing` and `support` are single files; `fp8_training` only re-exports.
ORDER = [
    "numerics",
    "tracing",
    "support",
    "kernels",
    "ops",
    "nn",
    "optim",
    "dist",
    "models",
    "decoders",
    "convert",
    "hf",
    "training",
    "rl",
    "tools",
    "sft",
    "grpo",
    "cli",
]
# Rooms, folders or single files that may import what not everybody has.
ONLY_IN = {
    "triton": {"kernels", "models/bdh/kernels"},
    "transformers": {
        *("decoders", "hf", "sft", "grpo", "tools/bench/random_model.py", "tools/bench/rollout/generators.py"),
        *("tools/bench/trainer_run.py", "rl/vllm.py"),
    },
    "accelerate": {"hf"},
    "peft": {"hf", "sft", "grpo", "rl/learner.py", "rl/loras.py"},
    "trl": {"sft", "rl/trainer.py", "tools/bench/trainer_run.py"},
    "vllm": {"rl/vllm.py", "rl/vllm_layers.py"},
    "reasoning_gym": {"rl/gym_process.py"},
    "datasets": {"sft", "tools/bench/trainer_run.py"},
}
MODELS_USED_IN = {"models", "training", "tools"}
# The files of `decoders` that import transformers, inside the functions that need it: importing octavo does not.
USES_TRANSFORMERS = {"decoders/attention.py", "decoders/causal_lm.py", "decoders/decoding.py", "decoders/match.py"}
MODULES = sorted(ROOT.rglob("*.py"))


def room(path):
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "octavo":
                yield from (f"octavo.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    here = room(path)
    for name in imports(path):
        top, _, rest = name.partition(".")
        file = path.relative_to(ROOT).as_posix()
        allowed = ONLY_IN.get(top, {here})
        assert any(file == place or file.startswith(f"{place}/") or here == place for place in allowed), (
            f"{name} belongs in {allowed}"
        )
        if top == "transformers" and here == "decoders":
            assert file in USES_TRANSFORMERS, f"{file} imports {name}"
        if top == "octavo" and rest and here in ORDER:
            there = rest.split(".")[0]
            if there in ORDER:
                assert ORDER.index(there) <= ORDER.index(here), f"{here} may not import {there}"
            else:
                assert (here, there) == ("cli", "__version__"), f"{here} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))
def test_models_can_be_removed(path):
    """Only what trains, plans or measures these models imports them, and triton comes with a kernel's first use."""
    here = path.relative_to(ROOT).parts[0]
    tree = ast.parse(path.read_text())
    for name in imports(path):
        assert here in MODELS_USED_IN or not name.startswith("octavo.models"), f"{here} imports {name}"
    if here == "models" and "kernels" not in path.parts:
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                assert ".kernels" not in node.module, f"{path} imports {node.module} when it is imported"


def test_files_are_short():
    long = {str(p.relative_to(ROOT)): n for p in MODULES if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_public_names():
    for name in octavo.__all__:
        assert hasattr(octavo, name), name
    import octavo.fp8_training as brought

    for name in brought.__all__:
        assert getattr(brought, name) is getattr(octavo, name), name


def test_importing_needs_torch_alone_and_does_nothing_else():
    code = """
import sys, os, logging
before_env, before_handlers = dict(os.environ), list(logging.getLogger().handlers)
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('rich', 'typer', 'safetensors', 'torchao', 'transformers', 'accelerate', 'triton'):
            raise ImportError(name + ' was imported')
sys.meta_path.insert(0, Refuse())
import torch
threads, tf32 = torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32
import octavo, octavo.fp8_training
assert dict(os.environ) == before_env and logging.getLogger().handlers == before_handlers
assert not logging.getLogger('octavo').handlers
assert (threads, tf32) == (torch.get_num_threads(), torch.backends.cuda.matmul.allow_tf32)
from torch.optim.optimizer import _global_optimizer_post_hooks
assert not _global_optimizer_post_hooks
assert 'torch._dynamo' not in sys.modules  # as long to import as all the rest
"""
    subprocess.run([sys.executable, "-c", code], check=True)
