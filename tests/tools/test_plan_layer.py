"""What a layer saves for backward: the plan against autograd's saved tensors, to the byte."""

import pytest
import torch

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.tools.bench.contenders import Contender
from octavo.tools.plan import persistent
from octavo.tools.plan.layer import saved_bytes
from octavo.tools.plan.memory import plan_memory
from octavo.tools.plan.options import Option
from octavo.tools.plan.request import Request
from octavo.tools.shapes import Case

pytest.importorskip("transformers")
pytest.importorskip("peft")

# The partitioner that inductor uses, without its compiler: what a compiled layer saves is its choice.
COMPILED = "aot_eager_decomp_partition"
CONFIG = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "intermediate_size": 640,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "rms_norm_eps": 1e-5,
}
KINDS = {"hf": "bf16", "own": "octavo-bf16", "fp8": "octavo"}


def case_of(model_type="llama", rank=None, targets="all"):
    config = {**CONFIG, "model_type": model_type}
    frozen = rank is not None
    return Case("test", config, 2, 256, 128, 0, "cpu", frozen=frozen, rank=rank or 0, targets=targets)


def prepared_of(case, option):
    from octavo.tools.bench.prepared_model import PreparedModel

    if option.activations == "fp8":  # which the bench does not know
        prepared = PreparedModel(case, Contender("test", "bf16", False))
        convert_to_fp8(prepared.model, FP8TrainingConfig.from_recipe(str(option.recipe), activations="fp8"))
        return prepared
    prepared = PreparedModel(case, Contender("test", KINDS[option.code], False, option.recipe, option.fp8_head))
    if option.weight_bytes == 4:
        prepared.model.float()
    return prepared


def layer_call(prepared, case, option):
    """The second decoder layer, and what it is called with in a step."""
    from octavo.tools.bench.random_model import decoder_layers

    layer = decoder_layers(prepared.model.get_base_model() if case.rank else prepared.model)[1]
    actual = []

    def look(_module, args, kwargs):
        actual.append((args, kwargs))

    handle = layer.register_forward_pre_hook(look, with_kwargs=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=option.weight_bytes == 4):
        prepared.model(**prepared.inputs, use_cache=False)
    handle.remove()
    (args, kwargs) = actual[0]
    return layer, args[0].detach().requires_grad_(), kwargs


def counted(case, option):
    """Bytes of all storages that autograd saves for a layer: those of weights and of the positions are there anyway."""
    prepared = prepared_of(case, option)
    layer, hidden, kwargs = layer_call(prepared, case, option)
    if option.compiled:
        torch._dynamo.reset()
        layer.compile(backend=COMPILED)
    others = [*prepared.model.parameters(), *kwargs["position_embeddings"]]
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    actual = {}

    def save(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            actual[storage.data_ptr()] = storage
        return tensor

    with torch.autocast("cpu", torch.bfloat16, enabled=option.weight_bytes == 4):
        if option.compiled:
            layer(hidden, **kwargs)  # compiles
        with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            layer(hidden, **kwargs)
    return sum(storage.nbytes() for storage in actual.values())


def eager_and_compiled(cases, few):
    """Every case in both ways; compiling takes seconds, so `make test` compiles but a few."""
    for case in cases:
        yield pytest.param(*case, False)
        yield pytest.param(*case, True, marks=() if case in few else pytest.mark.slow)


@pytest.mark.parametrize(
    ("model_type", "code", "recipe", "rank", "compiled"),
    eager_and_compiled(
        [
            ("llama", "hf", None, None),
            ("llama", "own", None, None),
            ("llama", "fp8", "delayed", None),
            ("llama", "fp8", "block", None),
            ("llama", "fp8", "channel", None),
            ("llama", "hf", None, 8),
            ("llama", "own", None, 8),
            ("llama", "fp8", "block", 8),
            ("llama", "fp8", "channel", 8),
            ("qwen3", "hf", None, None),
            ("qwen3", "fp8", "delayed", None),
            ("qwen3", "fp8", "channel", 8),
        ],
        few=[("llama", "own", None, None), ("llama", "fp8", "channel", 8), ("qwen3", "fp8", "delayed", None)],
    ),
)
def test_kept_bytes(model_type, code, recipe, rank, compiled):
    case = case_of(model_type, rank)
    option = Option(code, recipe, compiled=compiled)
    assert sum(saved_bytes(case, option).values()) == counted(case, option)


@pytest.mark.parametrize("targets", ["attention", "mlp"])
@pytest.mark.parametrize(
    ("code", "recipe", "compiled"), eager_and_compiled([("hf", None), ("fp8", "channel")], few=[("hf", None)])
)
def test_kept_bytes_with_some_adapters(code, recipe, compiled, targets):
    case = case_of(rank=8, targets=targets)
    option = Option(code, recipe, compiled=compiled)
    assert sum(saved_bytes(case, option).values()) == counted(case, option)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kept_bytes_with_fp32_weights(compiled):
    case, option = case_of(), Option("fp8", "delayed", weight_bytes=4, compiled=compiled)
    assert sum(saved_bytes(case, option).values()) == counted(case, option)


@pytest.mark.parametrize(
    ("model_type", "recipe", "compiled"),
    eager_and_compiled([("llama", "delayed"), ("llama", "block"), ("qwen3", "delayed")], few=[("llama", "block")]),
)
def test_kept_bytes_with_fp8_activations(model_type, recipe, compiled):
    case, option = case_of(model_type), Option("fp8", recipe, activations="fp8", compiled=compiled)
    assert sum(saved_bytes(case, option).values()) == counted(case, option)


def test_beside_bf16_weights_adapters_in_fp32_are_refused():
    """They would be computed from copies of their inputs in FP32: half as much again as what is planned."""
    with pytest.raises(ValueError, match="autocast_adapter_dtype=False"):
        saved_bytes(case_of(rank=8), Option("hf", adapter_bytes=4))


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("option", "rank"),
    [
        (Option("hf"), None),
        (Option("fp8", "delayed", weight_bytes=4), None),
        (Option("hf"), 8),
        (Option("fp8", "block"), 8),
        (Option("fp8", "channel"), 8),
    ],
    ids=lambda value: str(value) if value is None or isinstance(value, int) else value.name,
)
def test_weights_and_gradients(model_type, option, rank):
    case = case_of(model_type, rank)
    model = prepared_of(case, option).model
    assert persistent.weights(case, option) == sum(weight.nbytes for weight in model.parameters())
    assert persistent.gradients(case, option) == sum(p.nbytes for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "adamwfp8", "adamw4bit"])
def test_states(name):
    from octavo.optim import build_optimizer

    if name != "adamw":
        pytest.importorskip("torchao")
    case, option = case_of(), Option("own", optimizer=name)
    model = prepared_of(case, option).model
    optimizer = build_optimizer(name, model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    actual = 0
    for state in optimizer.state.values():
        for moment in (state["exp_avg"], state["exp_avg_sq"]):
            parts = getattr(moment, "tensor_attrs", None)
            # Tables of levels, `qmap`, are a kilobyte each at most.
            names = [part for part in parts if part != "qmap"] if parts else []
            actual += sum(getattr(moment, part).nbytes for part in names) if names else moment.nbytes
    # Norms are too small to be quantised: they keep states like themselves.
    norms = 2 * 2 * persistent.norm_parameters(case)
    assert persistent.states(case, option) == pytest.approx(actual, abs=norms)


def planned_buffers(option, tokens=4096, **adapters):
    """At the last layer's backward, of a model as `octavo plan --mode lora` plans it."""
    request = Request("8b", mode="lora", batch=2, seq=tokens // 2, **adapters)
    memory = plan_memory(request.case, option)
    return next(moment.buffers for moment in memory.moments if moment.name == "last layer")


def test_adapters_of_the_mlp_have_buffers_of_their_own():
    """On an FP8 base the gradients of x · Aᵀ, of gate, up and down, are there in FP32; beside BF16 weights, what
    down's adapter adds to dh is."""
    tokens, width = 4096, 14336
    for option, more in ((Option("fp8", "channel"), 3 * (64 - 8) * 4 * tokens), (Option("own"), 0)):
        for targets in ("all", "mlp"):
            ranks = [planned_buffers(option, rank=rank, targets=targets) for rank in (8, 64)]
            assert ranks[1] - ranks[0] == more
        assert len({planned_buffers(option, rank=rank, targets="attention") for rank in (8, 64)}) == 1
    for code in ("own", "hf"):
        without, with_mlp = (planned_buffers(Option(code), rank=8, targets=t) for t in ("attention", "mlp"))
        assert with_mlp - without == width * 2 * tokens
