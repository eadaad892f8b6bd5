"""The planned peak against what was measured on a GPU: the files of `benchmarks/results`.

No factor in the plan is fitted, but these files did show which tensors are there at the peak: that they agree is no
proof for shapes, options and moments that they do not hold (checkpointing, Qwen3).
"""

import json
from pathlib import Path

import pytest

from octavo.tools.plan import persistent
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import Option
from octavo.tools.plan.timeline import GIB
from octavo.tools.shapes import Case, make_case

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"
OLD, NEWER, NEWEST = "2026-11-15-h200-", "2026-11-16-h200-", "2026-11-17-h200-"
# Measured after the plan was written. In the last one, buffers for states on the host were off by 2 and 3 % at first.
NEW = (
    f"{OLD}1b-16l-lora16-attention",
    f"{OLD}8b-8l-lora32-32768t",
    f"{OLD}8b-8l-lora8-32768t",
    f"{NEWER}8b-32l-optimizer",
    f"{NEWER}1b-16l-optimizer",
    f"{NEWER}8b-32l-offload",
    f"{NEWEST}8b-32l-eager",
    f"{NEWEST}8b-32l-lora32-eager",
)
# Of what it was made after; some were measured again.
FILES = (
    f"{NEWER}1b-16l",
    f"{NEWER}3b-28l",
    f"{NEWER}8b-32l",
    f"{OLD}8b-8l",
    f"{NEWER}8b-32l-lora32",
    f"{OLD}8b-8l-lora32",
    f"{OLD}8b-8l-lora0-32768t",
    f"{NEWER}8b-32l-lora32-peers",
)
# Measured when eager norms kept FP32 copies (17.0 GiB; 15.0 are planned now): to be measured again.
STALE = (f"{OLD}8b-8l octavo delayed",)
CODES = {"bf16": "hf", "octavo-bf16": "own", "octavo": "fp8"}
BOUND = 0.08


def read(name):
    return json.loads((RESULTS / f"{name}.json").read_text())


def measured():
    actual = []
    for name in (*FILES, *NEW):
        result = read(name)
        result["case"]["config"]["tie_word_embeddings"] = False  # the bench builds two matrices in any case
        for row in result["rows"]:
            stale = f"{name} {row['name']}" in STALE
            if row["kind"] in CODES and row["turns"] and not row.get("graphs") and not stale:
                actual.append(pytest.param(Case.from_dict(result["case"]), row, id=f"{name} {row['name']}"))
    return actual


def option_of(row):
    """`wgrad=channel`: what is saved for dw has a scale per channel. Norms were joined after some were measured."""
    recipe = "channel" if row["wgrad"] == "channel" else row["recipe"]
    joined = "norms with the products" in row["summary"]
    return Option(
        CODES[row["kind"]],
        recipe,
        optimizer=row.get("optimizer"),
        compiled=row["compile"],
        fp8_head=row["fp8_head"],
        activations=row.get("activations", "bf16"),
        in_backward=row.get("in_backward", False) or row.get("offload") == "master",
        offload=row.get("offload"),
        joined_norms=joined,
    )


@pytest.mark.parametrize(("case", "row"), measured())
def test_peak(case, row):
    expected = max(turn["peak_gib"] for turn in row["turns"])
    assert plan_memory(case, option_of(row)).peak_gib == pytest.approx(expected, rel=BOUND)


def test_loading_and_two_steps():
    """8B in blocks, rank 32, one sequence of 512, checkpointed, AdamW; the script keeps a copy of the adapters."""
    row = read(f"{OLD}load")["rows"][0]
    case = make_case(
        preset="8b", config=None, layers=None, tokens=512, seq=512, seed=0, device="cpu", force=True, mode="lora"
    )
    option = Option("fp8", "block", checkpointing="layers", compiled=False, adapter_bytes=4)
    adapters = case.adapter_parameters * option.adapter_bytes
    assert persistent.weights(case, option) - adapters == row["weights_bytes"]
    planned = plan_memory(case, option)
    expected = row["training"]["device_peak_allocated"] / GIB
    assert planned.peak_gib + adapters / GIB == pytest.approx(expected, rel=BOUND)


def test_a_plan_without_the_loss_in_chunks_would_be_wrong():
    """The bound tells: Hugging Face's loss in place of ours, or a layer's gate and up left out, is noticed."""
    result = read(f"{NEWER}8b-32l")
    row = next(row for row in result["rows"] if row["name"] == "octavo-bf16")
    case, expected = Case.from_dict(result["case"]), max(turn["peak_gib"] for turn in row["turns"])
    assert abs(plan_memory(case, Option("hf", optimizer=None)).peak_gib / expected - 1) > BOUND
    own = plan_memory(case, Option("own", optimizer=None))
    less = own.peak_gib - case.layers * own.saved["gate and up"] / GIB
    assert abs(less / expected - 1) > BOUND
