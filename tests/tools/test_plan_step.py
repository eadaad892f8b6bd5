"""The planned peak of whole steps against what the CPU's allocator hands out: moments that no GPU has measured yet.

In BF16 and eager: FP8 is emulated here, in FP32, and so is the loss in chunks; Hugging Face's own loss is the same on
any device.
"""

import pytest
import torch
from allocations import allocated

from octavo.optim import offload_states, step_in_backward
from octavo.tools.bench.contenders import Contender
from octavo.tools.plan import host, persistent
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import Option
from octavo.tools.plan.timeline import WORKSPACE
from octavo.tools.shapes import Case

pytest.importorskip("transformers")
pytest.importorskip("peft")

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
}
SMALL, LARGE = 128, 4096  # vocabularies: with the large one, the loss is the peak


def case_of(vocabulary, tokens, rank, model_type, tied=False):
    config = {**CONFIG, "vocab_size": vocabulary, "model_type": model_type, "tie_word_embeddings": tied}
    frozen = rank is not None
    return Case("test", config, 4, tokens, min(tokens, 128), 0, "cpu", frozen=frozen, rank=rank or 0)


def counted(case, option):
    from octavo.tools.bench.prepared_model import PreparedModel

    prepared = PreparedModel(case, Contender("test", {"hf": "bf16", "own": "octavo-bf16"}[option.code], False))
    if persistent.is_tied(case):  # the bench builds two matrices in any case
        prepared.model.lm_head.weight = prepared.model.model.embed_tokens.weight
    if option.checkpointing == "layers":
        prepared.model.gradient_checkpointing_enable()
    trained = [parameter for parameter in prepared.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)  # as on a GPU
    states = None
    if option.in_backward:
        states = step_in_backward(optimizer, offload=option.offload is not None).states
    elif option.offload:
        states = offload_states(optimizer).states

    def step():
        prepared.model(**prepared.inputs, use_cache=False).loss.backward()
        optimizer.step()

    def two_steps():
        step()
        step()

    step()
    prepared.forget_gradients()
    if states is None:
        return allocated(step) + persistent.weights(case, option) + persistent.states(case, option)
    step()  # by now it knows what comes next
    prepared.forget_gradients()
    # States on their way were made before the profiler looks, so it would not see them go. On a CPU they are copies.
    states._coming.clear()
    return allocated(two_steps) + persistent.weights(case, option)


@pytest.mark.parametrize(
    ("vocabulary", "tokens", "rank", "model_type", "option", "moment"),
    [
        (LARGE, 128, None, "llama", Option("hf", compiled=False), "head"),
        (LARGE, 128, 8, "llama", Option("hf", compiled=False), "head"),
        (LARGE, 128, None, "llama", Option("hf", compiled=False, checkpointing="layers"), "head"),
        (LARGE, 128, 8, "llama", Option("hf", compiled=False, checkpointing="layers"), "head"),
        (SMALL // 4, 256, None, "llama", Option("hf", compiled=False), "last layer"),
        (SMALL, 256, 8, "llama", Option("own", compiled=False), "last layer"),
        (SMALL, 256, None, "llama", Option("own", compiled=False, checkpointing="layers"), "first layer"),
        (SMALL, 256, 8, "llama", Option("own", compiled=False, checkpointing="layers"), "last layer"),
        (SMALL, 256, 8, "qwen3", Option("own", compiled=False, checkpointing="layers"), "last layer"),
        (SMALL, 32, None, "llama", Option("own", compiled=False), "embedding"),
        (LARGE, 32, None, "qwen3", Option("hf", compiled=False, checkpointing="layers"), "embedding"),
        (LARGE, 32, None, "llama", Option("own", compiled=False, in_backward=True), "head"),
        (
            SMALL,
            256,
            None,
            "llama",
            Option("own", compiled=False, in_backward=True, checkpointing="layers"),
            "last layer",
        ),
        (LARGE, 32, None, "llama", Option("own", compiled=False, offload="optimizer"), "embedding"),
        (LARGE, 32, None, "llama", Option("own", compiled=False, in_backward=True, offload="optimizer"), "head"),
        (SMALL, 256, None, "llama", Option("own", compiled=False, offload="optimizer"), "last layer"),
        (
            SMALL,
            256,
            None,
            "llama",
            Option("own", compiled=False, in_backward=True, offload="optimizer"),
            "last layer",
        ),
        (
            LARGE,
            32,
            None,
            "qwen3",
            Option("hf", compiled=False, checkpointing="layers", offload="optimizer"),
            "embedding",
        ),
    ],
)
def test_peak_of_a_step(vocabulary, tokens, rank, model_type, option, moment):
    case = case_of(vocabulary, tokens, rank, model_type)
    planned = plan_memory(case, option)
    assert planned.peak.name == moment
    total, expected = planned.peak.total - WORKSPACE, counted(case, option)
    if option.offload is None:
        assert total == pytest.approx(expected, rel=0.08)
    else:  # a GPU keeps the buffers that states have come in, a CPU makes them anew for each
        assert 0.92 * expected <= total <= 1.08 * (expected + host.on_gpu(case, option))


@pytest.mark.parametrize(
    "option",
    [
        Option("own", compiled=False),
        Option("hf", compiled=False),
        Option("hf", compiled=False, checkpointing="layers"),
        Option("own", compiled=False, in_backward=True),
    ],
    ids=lambda option: option.full_name,
)
def test_a_tied_embedding_has_two_gradients_or_three_for_a_moment(option):
    """The embedding's own is made while the head's is there: and counts more than the bound."""
    case = case_of(4 * LARGE, 8, None, "llama", tied=True)
    planned = plan_memory(case, option)
    head = persistent.vocabulary_parameters(case) * option.weight_bytes
    at_embedding = next(moment for moment in planned.moments if moment.name == "embedding")
    assert planned.peak is at_embedding and head > 0.1 * (planned.peak.total - WORKSPACE)
    assert planned.peak.total - WORKSPACE == pytest.approx(counted(case, option), rel=0.08)
