"""A Hugging Face decoder on the GPU: every recipe, eager, compiled, checkpointed, odd batches, no synchronisation."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from bounds import cosine

from octavo import FP8TrainingConfig, convert_to_fp8

transformers = pytest.importorskip("transformers")

RECIPES = {
    **{name: FP8TrainingConfig.from_recipe(name) for name in ("delayed", "current", "channel", "block", "mx")},
    "block, channel wgrad": FP8TrainingConfig.from_recipe("block", wgrad="channel"),
    "E5M2": FP8TrainingConfig(fp8_format="E5M2"),
    "FP8 head": FP8TrainingConfig(fp8_head=True),
    "stochastic": FP8TrainingConfig(rounding={"g": "stochastic"}),
}
BATCHES = [(2, 256), (3, 37), (1, 1025)]


def build(**changes):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 2000,
        "use_cache": False,
    }
    config = transformers.LlamaConfig(**sizes | changes)
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        ).train()


def batch(rows, length):
    ids = torch.randint(1, 2000, (rows, length), generator=torch.Generator().manual_seed(1)).cuda()
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


def run(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_close_to(actual, expected, least=0.98):
    (loss, gradients), (expected_loss, expected_gradients) = actual, expected
    assert abs(loss / expected_loss - 1) < 0.01
    flat, expected_flat = (torch.cat([g[n].flatten() for n in gradients]) for g in (gradients, expected_gradients))
    assert cosine(flat, expected_flat) > least
    for name, gradient in gradients.items():
        assert gradient.isfinite().all() and cosine(gradient, expected_gradients[name]) > least - 0.06, name


@pytest.fixture(scope="module")
def references():
    if not torch.cuda.is_available():
        return {}
    model = build()
    return {size: run(model, batch(*size)) for size in BATCHES}


@pytest.mark.parametrize("name", RECIPES)
def test_eager(name, references):
    for size in BATCHES:
        model = build()  # anew: without optimiser steps, a delayed scale would stay that of the first batch
        report = convert_to_fp8(model, RECIPES[name])
        for _ in range(2):
            assert_close_to(run(model, batch(*size)), references[size], least=0.96 if name == "E5M2" else 0.98)
        assert len(report.fused) == 5
        assert all(s["saturated"] < 0.01 for s in report.scaling.statistics().values())


@pytest.mark.parametrize("size", BATCHES, ids=str)
def test_bf16(size, references):
    model = build()
    convert_to_fp8(model, precision="bf16")
    assert_close_to(run(model, batch(*size)), references[size], least=0.999)


@pytest.mark.parametrize("name", ["FP8 head", "current", "channel", "block, channel wgrad", "mx"])
def test_compiled(name, references):
    torch._dynamo.reset()
    model = build()
    convert_to_fp8(model, RECIPES[name])
    for layer in model.model.layers:
        layer.compile(fullgraph=True)
    for _ in range(2):
        assert_close_to(run(model, batch(3, 37)), references[3, 37])
    assert_no_synchronisation(model, batch(3, 37))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", ["delayed", "block", "FP8 head"])
def test_gradient_checkpointing(name, use_reentrant):
    models = [build(), build()]
    for model in models:
        convert_to_fp8(model, RECIPES[name])
    models[1].gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    for _ in range(2):
        (loss, plain), (loss_again, checkpointed) = (run(model, batch(3, 37)) for model in models)
        torch.testing.assert_close(loss, loss_again)
        for key, gradient in plain.items():
            assert cosine(gradient, checkpointed[key]) > 0.9999, key  # cuDNN's backward adds up in any order


def assert_no_synchronisation(model, inputs):
    """Neither forward nor backward of a warm step waits for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(**inputs).loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", RECIPES)
def test_no_host_synchronisation(name):
    model = build()
    convert_to_fp8(model, RECIPES[name])
    for _ in range(2):
        run(model, batch(2, 256))
    assert_no_synchronisation(model, batch(2, 256))


def test_padding_mask():
    model, reference = build(), build()
    convert_to_fp8(model)
    inputs = batch(3, 37)
    mask = torch.ones_like(inputs["input_ids"])
    mask[1, 20:] = 0
    inputs |= {"attention_mask": mask, "labels": inputs["labels"].masked_fill(mask == 0, -100)}
    assert_close_to(run(model, inputs), run(reference, inputs))


def test_training_follows_bf16():
    """Thirty steps with delayed scales that roll: the loss goes where that of BF16 goes."""
    losses = {}
    for fp8 in (False, True):
        model = build()
        if fp8:
            convert_to_fp8(model, FP8TrainingConfig(fp8_head=True))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(30):
            loss, _ = run(model, batch(2, 256))
            optimizer.step()
        losses[fp8] = loss.item()
    assert losses[True] < 5 and abs(losses[True] / losses[False] - 1) < 0.1


def test_the_planner_keeps_small_layers_in_bf16():
    model = build(intermediate_size=8192, hidden_size=4096, num_hidden_layers=1)
    report = convert_to_fp8(model, tokens=8192)
    assert {e.name.split(".")[-1] for e in report.in_fp8} >= {"gate_proj", "up_proj", "down_proj", "q_proj", "o_proj"}
    with pytest.raises(ValueError, match="does not pay at 64 tokens"):
        convert_to_fp8(build(), tokens=64)


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_offloaded_to_the_host(where):
    """Accelerate brings each weight to the GPU when its own module is called; scaling state goes there by itself."""
    accelerate = pytest.importorskip("accelerate")
    model = build()
    with torch.no_grad():
        expected = model(**batch(2, 256)).loss
    model.to(where)
    report = convert_to_fp8(model, FP8TrainingConfig.from_recipe("current"))
    accelerate.cpu_offload(model, torch.device("cuda"))
    with torch.no_grad():
        for _ in range(2):
            loss = model(**batch(2, 256)).loss
            assert abs(loss / expected - 1) < 0.01
    assert report.hooked


def test_two_threads_at_once():
    """Each on a stream of its own: results are those of one after the other."""
    model = build().eval()
    convert_to_fp8(model, FP8TrainingConfig.from_recipe("current"))
    inputs = [batch(2, 64)["input_ids"].roll(shift, 1) for shift in range(4)]
    torch.cuda.synchronize()  # other streams do not wait for this one

    def logits(ids):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
            actual = [model(input_ids=ids).logits for _ in range(10)]
            torch.cuda.current_stream().synchronize()
            return actual

    expected = [logits(ids)[0] for ids in inputs]
    with ThreadPoolExecutor(4) as pool:
        for actual, alone in zip(pool.map(logits, inputs), expected, strict=True):
            assert all(torch.equal(each, alone) for each in actual)
