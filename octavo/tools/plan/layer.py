"""Tensors that one decoder layer saves for backward, and buffers that its backward allocates.

Letters: M tokens, K width, Q and KV outputs of q and of k or v, F hidden of the MLP, R rank. Everything is in bytes.

    attention      q, k, v, its output, one FP32 number for each head and token
    norms          compiled: their inputs in BF16. Eager: in FP32, and the inputs of trained weights.
                   Before products of a frozen FP8 base: nothing but 1/rms (`numerics/norm.py`)
    BF16 linears   their input, where the weight is trained or has an adapter; gate, up, and eager silu(gate)
    FP8, trained   inputs of q/k/v, o and gate/up in FP8; gate and up in BF16 (`nn/*_function.py`), in FP8
                   with `activations="fp8"`, which per tensor joins norms, too
    FP8, frozen    inputs of q/k/v and gate/up in FP8, or as they are where products are not in FP8; gate and up in FP8
                   (`nn/lora.py`, `nn/lora_mlp.py`)
    adapters       x · Aᵀ of each

The partitioner of `torch.compile` chooses what to save; the choices here are those it made for these layers. All layers
count alike, though the first of a model with a frozen embedding need not save its input: one tensor too many here.
"""

from dataclasses import dataclass

from octavo.numerics.quantize import BLOCK
from octavo.ops.mlp import chunk_rows
from octavo.tools.plan.options import Option
from octavo.tools.shapes import MEMBERS, TARGETS, Case

BF16, FP32 = 2, 4
INPUT = "input of the layer"


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer, by the letters above."""

    m: int
    k: int
    q: int
    kv: int
    f: int
    heads: int
    kv_heads: int
    has_qk_norm: bool

    @classmethod
    def of(cls, case: Case) -> "Sizes":
        config = case.config
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        return cls(
            m=case.tokens,
            k=config["hidden_size"],
            q=heads * case.head_dim,
            kv=kv_heads * case.head_dim,
            f=config["intermediate_size"],
            heads=heads,
            kv_heads=kv_heads,
            has_qk_norm=config["model_type"] == "qwen3",
        )


def is_adapted(case: Case, linear: str) -> bool:
    return bool(case.rank) and linear in TARGETS[case.targets]


def layer_input(case: Case, option: Option) -> int:
    """Return the bytes that a checkpointed layer saves. The residual stream has the embedding's dtype."""
    return case.tokens * case.config["hidden_size"] * option.weight_bytes


def saved_bytes(case: Case, option: Option) -> dict[str, int]:
    """Return the bytes that a layer saves, by tensor."""
    linears = _fp8_linears if option.code == "fp8" else _bf16_linears
    saved = {**_attention(case, option), **_norms(case, option), **linears(case, option), **_adapters(case)}
    return {name: size for name, size in saved.items() if size}


def _attention(case: Case, option: Option) -> dict[str, int]:
    s = Sizes.of(case)
    saved = {
        "q, k and v": (s.q + 2 * s.kv) * BF16 * s.m,
        "attention's output": s.q * BF16 * s.m,
        "log-sum-exp": s.heads * FP32 * s.m,
    }
    if s.has_qk_norm:
        # In FP8 they are slices of one product, which keep v's part, too; 1 / rms is computed again.
        before = BF16 * (s.q + 2 * s.kv)
        if option.code != "fp8":
            wide = BF16 if option.compiled else FP32 + (0 if case.frozen else BF16)
            before = wide * (s.q + s.kv) + FP32 * (s.heads + s.kv_heads)
        saved["q and k before norms"] = before * s.m
    return saved


def joins_norms(case: Case, option: Option) -> bool:
    if option.code != "fp8" or not option.joined_norms:
        return False
    return case.frozen or (option.activations == "fp8" and option.recipe == "delayed")


def _norms(case: Case, option: Option) -> dict[str, int]:
    s = Sizes.of(case)
    saved = {"1/rms": 2 * FP32 * s.m}
    if joins_norms(case, option):
        return saved
    if option.compiled or (option.code == "fp8" and option.weight_bytes == BF16):
        return saved | {INPUT: layer_input(case, option), "attention's part of the residual": s.k * BF16 * s.m}
    if option.code == "fp8":  # under autocast, attention's part has another dtype, and the second norm is apart
        wide = s.k * FP32 * s.m
        return saved | {INPUT: layer_input(case, option), "second norm's input": wide, "normed, without weights": wide}
    normed = 0 if case.frozen else 2 * s.k * option.weight_bytes * s.m
    return saved | {"norms' inputs": 2 * s.k * FP32 * s.m, "normed, without weights": normed}


def _bf16_linears(case: Case, option: Option) -> dict[str, int]:
    s = Sizes.of(case)
    if case.rank and option.adapter_bytes != BF16:
        raise ValueError(
            f"adapter_bytes={option.adapter_bytes}: beside BF16 weights only adapters in BF16 are planned for; PEFT "
            "makes those with autocast_adapter_dtype=False, and keeps far more activations without it"
        )

    def wanted(linear: str) -> bool:
        return not case.frozen or is_adapted(case, linear)

    return {
        "input of q, k and v": s.k * BF16 * s.m * wanted("qkv"),
        "input of gate and up": s.k * BF16 * s.m * wanted("gate_up"),
        "gate and up": 2 * s.f * BF16 * s.m,
        "silu of gate": 0 if option.compiled else s.f * BF16 * s.m,
        "input of down": s.f * BF16 * s.m * wanted("down"),
    }


def _fp8_linears(case: Case, option: Option) -> dict[str, int]:
    s = Sizes.of(case)
    gate_up_fp8 = (2 * s.f + -(-2 * s.f // BLOCK)) * s.m  # one byte of scale for 128
    if not case.frozen:
        return {
            "input of q, k and v": _columns(s.m, s.k, option),
            "input of o": _columns(s.m, s.q, option),
            "input of gate and up": _columns(s.m, s.k, option),
            "gate and up": gate_up_fp8 if option.activations == "fp8" else 2 * s.f * BF16 * s.m,
            "scale of h": FP32 if option.recipe == "delayed" else 0,
            "scales of weights": 4 * FP32 if option.recipe == "delayed" else 0,  # q, k and v; o; gate and up; down
        }
    joined = joins_norms(case, option)
    x = _rows(s.m, s.k, option) if option.fp8_products else s.k * BF16 * s.m
    return {
        "input of q, k and v": x * (joined or is_adapted(case, "qkv")),
        "input of gate and up": x * (joined or is_adapted(case, "gate_up")),
        "gate and up": gate_up_fp8,
    }


def _rows(m: int, k: int, option: Option) -> int:
    scales = {"delayed": 1, "channel": m, "block": m * -(-k // BLOCK)}[str(option.recipe)]
    return m * k + FP32 * scales


def _columns(m: int, k: int, option: Option) -> int:
    scales = {"delayed": 1, "channel": k, "block": k * -(-m // BLOCK)}[str(option.recipe)]
    return m * k + FP32 * scales


def _adapters(case: Case) -> dict[str, int]:
    count = sum(len(MEMBERS[linear]) for linear in TARGETS[case.targets]) if case.rank else 0
    return {"adapters' x · Aᵀ": count * case.rank * BF16 * case.tokens}


def backward_buffers(case: Case, option: Option) -> int:
    """Return the peak of buffers while a layer's MLP goes backward: the widest tensors."""
    s = Sizes.of(case)
    g = dx = s.k * BF16 * s.m
    down, gate_up = s.k * s.f, 2 * s.k * s.f  # elements of the weights
    if option.code != "fp8":
        # dh, gradients of gate and up, and an adapter's part of dh. Eager, h and silu(gate) make room for two of them.
        tensors = 3 + is_adapted(case, "down") if option.compiled else 2
        return g + tensors * s.f * BF16 * s.m + (0 if case.frozen else down * option.weight_bytes)
    if not case.frozen:
        g_q, hidden = 2 * s.k * s.m, 2 * s.f * s.m  # g in both layouts; dh, or d(gate, up) in one layout
        own = down * option.weight_bytes
        return max(
            g + g_q + 3 * hidden + s.f * s.m,  # dh, both layouts of d(gate, up), h
            g + g_q + 2 * hidden + s.f * s.m + own,
            g + 2 * hidden + dx + own + gate_up,  # gate and up as columns, for dx
            g + hidden + dx + own + gate_up * option.weight_bytes,
        )
    chunk = min(s.m, chunk_rows(s.m, 2 * s.f))
    ranks = case.rank * sum(len(MEMBERS[name]) for name in ("gate_up", "down") if is_adapted(case, name))
    # Weights transposed, or dequantised; of one chunk dh and d(gate, up), or that and its FP8 copy; FP32 gradients of
    # adapters.
    weights = (down + gate_up) * (1 if option.fp8_products else BF16)
    return g + dx + weights + 3 * s.f * BF16 * chunk + ranks * FP32 * s.m
