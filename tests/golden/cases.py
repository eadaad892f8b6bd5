"""Small models of every kind that Octavo computes in its own way, and the bits they produce.

Each case trains for two steps through the public API and returns every tensor by name: losses, logits, all gradients,
and the scaling state. What refactoring must not change is in here; `record.py` writes it down.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import octavo
from octavo import FP8TrainingConfig

RECIPES = {
    **{name: FP8TrainingConfig.from_recipe(name) for name in ("delayed", "current", "channel", "block", "mx")},
    "channel wgrad": FP8TrainingConfig.from_recipe("block", wgrad="channel"),
    "stochastic": FP8TrainingConfig(rounding="stochastic"),
    "E5M2": FP8TrainingConfig(fp8_format="E5M2"),
}
SIZES = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 200,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
BF16, FP32 = torch.bfloat16, torch.float32
Case = Callable[[], dict[str, Tensor]]
Step = Callable[[], tuple[Tensor, Tensor]]  # forward and backward: the loss and an output


def all_cases(device: str) -> dict[str, Case]:
    """Every case by its name, in a fixed order."""
    return dict(_cases(device))


def _cases(device: str) -> Iterator[tuple[str, Case]]:
    for recipe, config in RECIPES.items():
        for dtype in (FP32, BF16):
            yield f"linear, {recipe}, {str(dtype)[6:]}", partial(_linear, config, dtype, device)
        yield f"Llama, {recipe}", partial(_decoder, "Llama", config, device)
        yield f"autocast, {recipe}", partial(_autocast, config, device)
    for recipe in ("delayed", "block"):
        for family in ("Qwen2", "Qwen3", "Gemma", "Gemma3"):  # biases, norms of q and k; norms that are not fused
            yield f"{family}, {recipe}", partial(_decoder, family, RECIPES[recipe], device)
        fp8 = RECIPES[recipe].replace(activations="fp8")
        yield f"Llama, {recipe}, FP8 activations", partial(_decoder, "Llama", fp8, device)
        yield f"Llama, {recipe}, FP8 head", partial(_decoder, "Llama", fp8.replace(fp8_head=True), device)
    for granularity in ("tensor", "channel", "block"):
        for fp8_products in (True, False):
            name = f"frozen {granularity}, {'FP8' if fp8_products else 'BF16'} products"
            for adapters in ("all", "q and v", "MLP"):
                yield f"{name}, LoRA on {adapters}", partial(_lora, granularity, fp8_products, adapters, device)
            yield f"{name}, bias", partial(_lora, granularity, fp8_products, "o", device, family="Qwen2")
            yield f"{name}, Gemma3", partial(_lora, granularity, fp8_products, "all", device, family="Gemma3")
    for recipe in ("delayed", "current"):
        yield f"Llama, {recipe}, FP8-only weights", partial(_fp8_only, RECIPES[recipe], device)
        yield f"fused BDH, {recipe}", partial(_bdh, RECIPES[recipe], device)


def digest(tensor: Tensor) -> tuple[str, float]:
    """A hash of the bits, and the norm of the finite values, which changes little when few bits do."""
    data = tensor.detach().cpu().contiguous()
    head = f"{data.dtype}{tuple(data.shape)}".encode()
    bits = hashlib.sha256(head + data.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:12]
    norm = torch.nan_to_num(data.double(), posinf=0, neginf=0).norm().item()
    return bits, float(f"{norm:.4g}")


def machine(device: str) -> str:
    """A hash of plain products and sums: equal where torch and the processor compute the same bits."""
    outputs = []
    generator = torch.Generator().manual_seed(7)
    for dtype in (FP32, BF16, torch.float64):
        for m, k, n in ((42, 128, 256), (42, 160, 128), (128, 42, 160), (40, 33, 17)):
            a, b = (torch.randn(*s, generator=generator).to(device, dtype) for s in ((m, k), (k, n)))
            y = a @ b
            outputs += [y, y.softmax(-1), y.sum(0), nn.functional.silu(y), y.square().mean(-1).rsqrt(), y.exp()]
    return hashlib.sha256("".join(digest(y)[0] for y in outputs).encode()).hexdigest()[:16]


def _train(model: nn.Module, run: Step, optimizer: Any = None) -> dict[str, Tensor]:
    """Loss, output, gradients and scaling state of two steps."""
    optimizer = optimizer or torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    tensors: dict[str, Tensor] = {}
    for step in range(2):
        torch.manual_seed(step)
        loss, output = run()
        tensors |= {f"{step} loss": loss.detach(), f"{step} output": output.detach()}
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        tensors |= {f"{step} d {name}": gradient.clone() for name, gradient in gradients.items()}
        optimizer.step()
        optimizer.zero_grad()
    return tensors | _scaling_state(model)


def _scaling_state(model: nn.Module) -> dict[str, Tensor]:
    managers = {id(m): m for module in model.modules() if (m := getattr(module, "scaling_manager", None)) is not None}
    return {
        f"state {i} {path}": value
        for i, manager in enumerate(managers.values())
        for path, value in _tensors(manager.state_dict())
    }


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(part, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from _tensors(part, f"{path}.{i}")


def _linear(config: FP8TrainingConfig, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 80), nn.Tanh(), nn.Linear(80, 33, bias=False)).to(device, dtype)
    x = torch.randn(3, 14, 48).to(device, dtype)
    octavo.convert_to_fp8(model, config)

    def run() -> tuple[Tensor, Tensor]:
        y = model(x)
        loss = y.float().square().mean()
        loss.backward()
        return loss, y

    return _train(model, run)


def _autocast(config: FP8TrainingConfig, device: str) -> dict[str, Tensor]:
    torch.manual_seed(0)
    w, v = (nn.Parameter(torch.randn(2, *shape).to(device)) for shape in ((48, 64), (64, 32)))
    model = nn.ParameterList([w, v])
    x = torch.randn(2, 33, 48).to(device)
    context = octavo.fp8_autocast(config)

    def run() -> tuple[Tensor, Tensor]:
        with context:
            y = torch.einsum("bmk,bkn->bmn", x @ w, v)
        loss = y.square().mean()
        loss.backward()
        return loss, y

    return _train(model, run)


@cache
def _saved(family: str) -> Any:
    """A checkpoint of a small decoder, in a folder that lives as long as the process."""
    import transformers

    torch.manual_seed(0)
    name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, name)(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():  # as initialised, logits and biases are nearly zero, and hide mistakes
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith(".bias"):
                parameter.normal_(std=0.5)
            elif parameter.dim() == 2:
                parameter.mul_(3)
    folder = tempfile.TemporaryDirectory()
    model.to(BF16).save_pretrained(folder.name)
    return folder


def _load(family: str, device: str, **options: Any) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        _saved(family).name, dtype=BF16, attn_implementation="sdpa", **options
    )
    return model.train().to(device)


def _step_of(model: Any, device: str) -> Step:
    ids = torch.randint(1, SIZES["vocab_size"], (2, 21), generator=torch.Generator().manual_seed(1)).to(device)
    labels = ids.clone()
    labels[0, :5] = -100

    def step() -> tuple[Tensor, Tensor]:
        # On a GPU, other attention kernels than the plain one sum gradients in any order.
        with sdpa_kernel(SDPBackend.MATH):
            loss = model(input_ids=ids, labels=labels).loss
            loss.backward()
            with torch.no_grad():
                return loss, model(input_ids=ids).logits

    return step


def _decoder(family: str, config: FP8TrainingConfig, device: str) -> dict[str, Tensor]:
    model = _load(family, device)
    octavo.convert_to_fp8(model, config)
    return _train(model, _step_of(model, device))


def _fp8_only(config: FP8TrainingConfig, device: str) -> dict[str, Tensor]:
    from octavo.optim import build_optimizer, offload_master

    model = _load("Llama", device)
    octavo.convert_to_fp8(model, config)
    optimizer = build_optimizer("adamw", model.parameters(), lr=1e-2)
    offload_master(model, optimizer)
    tensors = _train(model, _step_of(model, device), optimizer)
    # Gradients are applied as they come, so the weights tell.
    return tensors | {f"after{name}": value for name, value in _tensors(model.state_dict())}


def _lora(granularity: str, fp8_products: bool, adapters: str, device: str, family: str = "Llama") -> dict[str, Tensor]:
    import peft

    targets = {
        "all": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "q and v": ["q_proj", "v_proj"],
        "MLP": ["gate_proj", "down_proj"],
        "o": ["o_proj"],
    }[adapters]
    config = octavo.OctavoConfig(granularity=granularity, fp8_products=fp8_products)
    model = _load(family, device, quantization_config=config)
    torch.manual_seed(0)
    lora = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, init_lora_weights=False)
    model = peft.get_peft_model(model, lora)
    return _train(model, _step_of(model, device))


def _bdh(config: FP8TrainingConfig, device: str) -> dict[str, Tensor]:
    from octavo.models import BDH, BDHConfig
    from octavo.models.bdh_fused import fuse

    torch.manual_seed(0)
    model = BDH(BDHConfig(dim=64, heads=2, neurons=256, layers=2)).to(device)
    fuse(model, config)
    tokens = torch.randint(256, (2, 65), generator=torch.Generator().manual_seed(1)).to(device)

    def run() -> tuple[Tensor, Tensor]:
        logits, loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        return loss, logits if logits is not None else loss

    return _train(model, run)
