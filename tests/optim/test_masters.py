"""FP8 weights on the device and FP32 masters on the host: the same training as with FP32 weights, in a byte each."""

import io

import pytest
import torch
from decoder_cases import batch, build
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.backends.debugging import aot_eager

from octavo import FP8Trainer, FP8TrainingConfig, convert_to_fp8, restore
from octavo.hf.export import export_fp8, save_merged
from octavo.nn.fp8_only import full_precision
from octavo.nn.frozen import quantize_weight
from octavo.nn.linear import FP8Linear
from octavo.optim import OPTIMIZERS, build_optimizer, masters, offload_master, step_in_backward, steps_in_backward
from octavo.optim.step_memory import measure_memory

CURRENT = FP8TrainingConfig.from_recipe("current")
WHOLE_BLOCKS = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
WHOLE_BLOCKS |= {"intermediate_size": 256, "num_hidden_layers": 1}


def converted(config=CURRENT, dtype=torch.float32, family="Llama", **changes):
    model = build(family, **changes).to(dtype)
    convert_to_fp8(model, config)
    return model


def run(model, optimizer, steps=3):
    losses = []
    for _ in range(steps):
        loss = model(**batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train(how, *args, name="adamw", steps=3, **kwargs):
    model = converted(*args, **kwargs)
    optimizer = build_optimizer(name, model.parameters(), 1e-3)
    how(model, optimizer)
    return run(model, optimizer, steps), model, optimizer


def in_fp32(_model, optimizer):
    step_in_backward(optimizer)


def assert_same(actual, expected):
    assert actual[0] == expected[0]
    actual, expected = actual[1].state_dict(), expected[1].state_dict()
    assert actual.keys() == expected.keys()
    for name in actual:
        assert torch.equal(actual[name], expected[name]), name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_as_with_fp32_weights(name):
    """With a scale of the weight as it is, rounding it when it is written is rounding it when it is used."""
    assert_same(train(offload_master, name=name), train(in_fp32, name=name))


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (CURRENT.replace(activations="fp8"), {}),
        (CURRENT.replace(fp8_format="E4M3", margin=1, percentile=99.9), {}),
        (FP8TrainingConfig.from_recipe("block"), WHOLE_BLOCKS),
        (FP8TrainingConfig.from_recipe("block", wgrad="channel"), WHOLE_BLOCKS),
        (CURRENT.replace(fp8_head=True), {}),
        (CURRENT, {"family": "Qwen2"}),
        (CURRENT, {"family": "Gemma"}),
    ],
    ids=["FP8 activations", "other scales", "block", "block, channel wgrad", "FP8 head", "biases", "Gemma"],
)
def test_the_same_for_every_recipe(config, changes):
    assert_same(train(offload_master, config, **changes), train(in_fp32, config, **changes))


def test_plain_linears_and_checkpointing():
    results = []
    for how in (offload_master, in_fp32):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 48))
        convert_to_fp8(model, CURRENT)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        how(model, optimizer)
        x = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).square().mean().backward()
            optimizer.step()
        assert model(x[:0]).shape == (0, 48)
        results.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(results[0].values(), results[1].values(), strict=True))


def test_compiled_layers():
    """One graph for all of them: what holds a weight is nothing that dynamo would specialise on."""
    expected = train(offload_master)[0]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    def compile_too(model, optimizer):
        model.config.use_cache = False
        offload_master(model, optimizer)
        for layer in model.model.layers:
            layer.compile(backend=backend)

    torch._dynamo.reset()
    assert train(compile_too)[0] == expected
    assert len(graphs) == 1


def test_two_graphs_at_a_time_are_noticed():
    """The first backward writes new weights, which the second one would take for those of its forward."""
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload_master(model, optimizer)
    first, second = (model(**batch()).loss for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_a_byte_on_the_device_and_four_on_the_host():
    _, model, optimizer = train(offload_master, dtype=torch.bfloat16)
    linear = model.model.layers[0].self_attn.q_proj
    assert linear.weight.untyped_storage().nbytes() == 2 and linear.weight.shape == (64, 64)
    assert linear.weight.dtype == torch.bfloat16 and linear.weight.grad is None
    assert linear.weight.isnan().all()
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        linear.weight.add_(1)
    assert linear.fp8_only.data.dtype == torch.float8_e4m3fn and linear.fp8_only.data.shape == (64, 64)
    assert linear.fp8_only.data.untyped_storage().nbytes() == (64 + 32 + 32) * 64  # with k and v
    assert full_precision(linear.weight).dtype == optimizer.state[linear.weight]["exp_avg"].dtype == torch.float32
    assert linear.weight_master is full_precision(linear.weight)
    norm = model.model.norm.weight
    assert norm.untyped_storage().nbytes() == 2 * 64 and full_precision(norm) is norm
    assert steps_in_backward(optimizer) and "weight in FP8 only" in repr(linear)


def test_masters_of_bf16_weights_keep_small_updates():
    model = converted(dtype=torch.bfloat16)
    weight = model.model.layers[0].mlp.down_proj.weight
    before = weight.detach().float()
    optimizer = build_optimizer("adamw", model.parameters(), 1e-6, weight_decay=0.0)
    offload_master(model, optimizer)
    run(model, optimizer)
    moved = (full_precision(weight) - before).abs()
    assert 1e-6 < moved.median() < 4e-6


@pytest.mark.parametrize("name", ["adamw", "adamw4bit"])
@pytest.mark.parametrize("config", [FP8TrainingConfig(), FP8TrainingConfig(activations="fp8", scaling="current")])
def test_a_run_that_resumes_is_the_same_run(name, config):
    def fresh():
        model = build().bfloat16()
        optimizer = build_optimizer(name, model.parameters(), 1e-3)
        return FP8Trainer(model, optimizer, config, offload="master")

    trainer = fresh()
    for _ in range(2):
        trainer.training_step(batch())
    file = io.BytesIO()
    torch.save(trainer.state_dict(), file)
    expected = [trainer.training_step(batch()) for _ in range(3)]
    other = fresh()
    other.training_step(batch())  # what is loaded takes the place of whatever there is, and of what is on its way
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert [other.training_step(batch()) for _ in range(3)] == expected
    mine, theirs = trainer.state_dict(), other.state_dict()
    assert all(torch.equal(value, theirs["model"][key]) for key, value in mine["model"].items())
    for i, state in mine["optimizer"]["state"].items():
        assert state["step"] == 5
        for key, value in state.items():
            assert torch.equal(_plain(value), _plain(theirs["optimizer"]["state"][i][key]))


def _plain(value):
    if hasattr(value, "dequantize") and hasattr(value, "codes"):
        return value.dequantize()
    return value.view(torch.int16) if value.dtype == torch.bfloat16 else value  # halves of FP32 are bits, not numbers


def test_weights_saved_and_loaded(tmp_path):
    _, model, _ = train(offload_master, dtype=torch.bfloat16)
    master = model.model.layers[1].mlp.up_proj.weight_master
    model.save_pretrained(tmp_path / "hf")
    trainer = FP8Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), convert_model_to_fp8=False)
    trainer.save_model(tmp_path / "own")
    for folder in ("hf", "own"):
        other = build()
        FP8Trainer(other, torch.optim.SGD(other.parameters(), lr=0.1)).load_model(tmp_path / folder)
        assert torch.equal(other.model.layers[1].mlp.up_proj.weight, master)
    again = converted(dtype=torch.bfloat16)
    offload_master(again, torch.optim.SGD(again.parameters(), lr=0.1))
    fp8_only = again.model.layers[1].mlp.up_proj.fp8_only
    FP8Trainer(again, torch.optim.SGD(again.parameters(), lr=0.1), convert_model_to_fp8=False).load_model(
        tmp_path / "own"
    )
    assert torch.equal(fp8_only.read(), master)
    original = model.model.layers[1].mlp.up_proj.fp8_only
    assert torch.equal(fp8_only.data.view(torch.uint8), original.data.view(torch.uint8))
    assert torch.equal(fp8_only.scale, original.scale)


@pytest.mark.parametrize("fp8", [True, False], ids=["FP8", "BF16"])
def test_exported_weights_come_from_the_masters(tmp_path, fp8):
    _, model, _ = train(offload_master, **WHOLE_BLOCKS)
    name = "model.layers.0.mlp.up_proj.weight"
    master = model.state_dict()[name]
    (export_fp8 if fp8 else save_merged)(model, tmp_path)
    actual = load_file(tmp_path / "model.safetensors")
    expected = quantize_weight(master, "block").data if fp8 else master
    assert torch.equal(actual[name].float(), expected.float())


def test_a_checkpoint_of_a_run_without_offloading():
    """Its scales are delayed ones; those of FP8 weights belong to their bytes, whatever is loaded."""
    config = FP8TrainingConfig(margin=3)
    trainers = []
    for offload in (None, "master"):
        model = build()
        optimizer = build_optimizer("adamw", model.parameters(), 1e-3)
        trainers.append(FP8Trainer(model, optimizer, config, offload=offload))
    plain, offloaded = trainers
    for _ in range(3):
        plain.training_step(batch())
    file = io.BytesIO()
    torch.save(plain.state_dict(), file)
    file.seek(0)
    offloaded.load_state_dict(torch.load(file, weights_only=True))
    losses = [float(trainer.training_step(batch())) for trainer in trainers]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_wrong_weights_are_refused_and_missing_ones_named():
    model = converted()
    offload_master(model, torch.optim.SGD(model.parameters(), lr=0.1))
    state = model.state_dict()
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(RuntimeError, match=r"k_proj.weight has shape \(3, 3\); this linear takes \(32, 64\)"):
        model.load_state_dict(state | {name: torch.zeros(3, 3)})
    del state[name]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "model.layers.0.self_attn.k_proj.weight"'):
        model.load_state_dict(state)
    assert model.load_state_dict(state, strict=False).missing_keys == [name]


def test_one_weight_of_a_product_alone():
    model = converted()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    offload_master(model, optimizer)
    attention = model.model.layers[0].self_attn
    before = {name: getattr(attention, name).weight_master.clone() for name in ("q_proj", "k_proj", "v_proj")}
    attention.k_proj.weight.grad = torch.ones(32, 64)
    optimizer.step()
    for name, old in before.items():
        expected = old - 1 if name == "k_proj" else old
        assert torch.equal(getattr(attention, name).weight_master, expected)
        fp8_only = getattr(attention, name).fp8_only
        torch.testing.assert_close(fp8_only.data.float() * fp8_only.scale, expected, rtol=2**-4, atol=0.01)
    assert attention.k_proj.weight.grad is None


def test_undone():
    model = converted(dtype=torch.bfloat16)
    optimizer = build_optimizer("adamw", model.parameters(), 1e-3)
    handle = offload_master(model, optimizer)
    run(model, optimizer)
    masters = {n: full_precision(p).clone() for n, p in model.named_parameters()}
    handle.remove()
    assert not steps_in_backward(optimizer)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, masters[name].bfloat16())
    run(model, optimizer, 1)  # with states in BF16, as weights are
    restore(model)
    run(model, optimizer, 1)
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() == 2]
    assert not any(torch.equal(p, masters[name].bfloat16()) for name, p in matrices)


def test_states_from_before_go_on():
    def late(model, optimizer):
        run(model, optimizer, 2)
        offload_master(model, optimizer)

    actual, expected = train(late, steps=2), train(in_fp32, steps=4)
    assert_same((actual[0], actual[1]), (expected[0][2:], expected[1]))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FP8TrainingConfig.from_recipe("channel"), r"q_proj.*granularity='channel': .*use granularity='tensor' or"),
        (FP8TrainingConfig.from_recipe("mx"), r"granularity='mx'"),
        (FP8TrainingConfig.from_recipe("block"), r"granularity='block' with out_features=\[64, 32, 32\]"),
        (FP8TrainingConfig(rounding={"w": "stochastic"}), r"rounding='stochastic' of w"),
    ],
)
def test_recipes_that_one_fp8_copy_cannot_serve(config, message):
    model = converted(config)
    with pytest.raises(ValueError, match=message):
        offload_master(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not any(p.isnan().any() for p in model.parameters())


def test_what_it_refuses(tmp_path):
    plain = build()
    with pytest.raises(ValueError, match=r"SGD trains no weight of an FP8 linear.*convert_to_fp8\(model\) first"):
        offload_master(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    model = converted()
    optimizer = torch.optim.SGD([model.model.layers[0].self_attn.q_proj.weight], lr=0.1)
    with pytest.raises(ValueError, match="are one product, and the optimiser trains only some of them"):
        offload_master(model, optimizer)
    tied = converted(CURRENT.replace(skip=()), tie_word_embeddings=True)
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight and lm_head.weight are one Parameter.*'lm_head' in skip"
    ):
        offload_master(tied, torch.optim.SGD(tied.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    offload_master(model, optimizer)
    with pytest.raises(ValueError, match="steps in backward already"):
        offload_master(model, optimizer)
    with pytest.raises(ValueError, match=r"SGD steps parameters of this AdamW in backward; call remove\(\)"):
        offload_master(model, build_optimizer("adamw", model.parameters(), 1e-3))
    other = torch.optim.SGD([linear.weight for linear in model.modules() if isinstance(linear, FP8Linear)], lr=0.1)
    for parameter in model.parameters():
        parameter._post_accumulate_grad_hooks = None  # as where the first was not of these
    with pytest.raises(ValueError, match=r"q_proj.*: another optimiser has their masters; call remove\(\)"):
        offload_master(model, other)
    with pytest.raises(ValueError, match=r"torch.float32 on cpu to torch.bfloat16 on cpu.*remove\(\)"):
        model.bfloat16()
    with pytest.raises(ValueError, match=r"LlamaForCausalLM has weights in FP8 only: call remove\(\)"):
        restore(model)
    model.to("cpu").float().eval()  # changes nothing
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(converted())
        with pytest.raises(ValueError, match="applied before they are averaged"):
            offload_master(model, torch.optim.SGD(model.parameters(), lr=0.1))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("options", [{"max_grad_norm": 1.0}, {"gradient_accumulation_steps": 2}], ids=str)
def test_what_the_trainer_refuses(options):
    model = build()
    with pytest.raises(ValueError, match=f"offload='master' with {next(iter(options))}"):
        FP8Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), offload="master", **options)


def test_measured_as_what_it_takes():
    """An offloaded weight's Parameter has a shape, but no memory: a byte is on the device, four are the master's."""
    _, model, optimizer = train(offload_master, dtype=torch.bfloat16)
    offloaded = sum(linear.weight.numel() for linear in model.modules() if isinstance(linear, FP8Linear))
    others = sum(p.numel() for p in model.parameters()) - offloaded
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    actual = measure_memory(model, optimizer)
    assert actual.weights == 2 * others + offloaded + buffers
    assert actual.states == 2 * 2 * others + (4 + 2 * 4) * offloaded  # here the host is the device


def test_too_little_host_memory_leaves_the_model_as_it_was(monkeypatch):
    model = converted()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = build_optimizer("adamw", model.parameters(), 1e-3)
    rooms = iter(range(5))

    def master_of(parameter):
        if next(rooms, None) is None:
            raise RuntimeError("no memory")
        return parameter.detach().float()

    monkeypatch.setattr(masters, "_master_of", master_of)
    with pytest.raises(RuntimeError, match="no memory"):
        offload_master(model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not steps_in_backward(optimizer)
    run(model, optimizer)
