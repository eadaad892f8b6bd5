"""Fused pieces for Hugging Face decoders: one product for q, k and v, one function for the MLP, a loss in chunks.

A module keeps its identity, its Parameters and its state-dict keys: only its class changes, to a subclass that computes
the same thing with fewer passes over memory, and `restore` changes it back. What a piece cannot serve goes the way of
the original class: a projection that PEFT has wrapped, labels that are not there, a cache that is being filled.

    attention   q, k and v share one quantised input and one GEMM; the attention itself runs on cuDNN
    mlp         gate and up share one GEMM; activation and quantising are one kernel, forward and backward
    loss        head and cross entropy in chunks of tokens: while training, the model returns the loss and no logits;
                the norm before it in one kernel
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from octavo.hf import attention, frozen, graphs
from octavo.hf.classes import GATE_UP, ORIGINAL, QKV, take_class
from octavo.hf.hooks import is_hooked
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import put_together, why_no_group
from octavo.nn.linear import FP8Linear, change_class
from octavo.nn.linear_function import linear
from octavo.nn.loss import FP8Head, linear_cross_entropy
from octavo.nn.mlp_function import gated_mlp
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.cross_entropy import IGNORED
from octavo.numerics.norm import Norm
from octavo.ops.mlp import MLPSpec

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")
ACTIVATIONS = {"SiLUActivation": "silu", "SiLU": "silu", "GELUTanh": "gelu_tanh"}
_PLAIN_NORMS = {f"{family}RMSNorm" for family in ("Llama", "Mistral", "Qwen2", "Qwen3")}  # weight · normed
# Children of fused modules that those do not call, but take the place of.
_PARTS = (
    *QKV, "o_proj", *GATE_UP, "down_proj", "act_fn", "lm_head", "self_attn", "mlp", "input_layernorm",
    "post_attention_layernorm",
)  # fmt: skip
# Arguments of causal models that transformers' default loss takes as we do, or has no use for.
_INPUTS = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache",
    "logits_to_keep", "return_dict", "output_hidden_states", "output_attentions", "output_router_logits",
    "num_items_in_batch", "shift_labels", "ignore_index", "is_causal", "seq_idx",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
}  # fmt: skip


class _Computed:
    """An attention module as its own forward sees it in one call: with q, k and v computed already.

    An object of that call, so that several threads may use one model, and nothing is left of a call that breaks off.
    """

    def __init__(self, module: Any, parts: Sequence[Tensor], residual: Tensor | None) -> None:
        q, k, v = parts
        self.module = module
        self.q_proj, self.k_proj, self.v_proj = (lambda _: q), (lambda _: k), (lambda _: v)
        if residual is not None:
            self.o_proj = lambda x: module.o_proj(x, residual=residual)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)


def is_attention(module: nn.Module) -> bool:
    return is_own(module, "Attention") and all(isinstance(getattr(module, name, None), nn.Linear) for name in QKV)


def is_mlp(module: nn.Module) -> bool:
    names = (*GATE_UP, "down_proj")
    return is_own(module, "MLP") and all(isinstance(getattr(module, name, None), nn.Linear) for name in names)


def is_causal_lm(module: nn.Module) -> bool:
    return is_of(module, "ForCausalLM") and type(getattr(module, "lm_head", None)) is nn.Linear


def is_plain_norm(module: Any) -> bool:
    """Whether it computes weight · h / rms(h)."""
    return type(module).__name__ in _PLAIN_NORMS and type(module).__module__.startswith("transformers.models.")


def is_of(module: nn.Module, kind: str) -> bool:
    """By name and origin: a class of that name elsewhere may compute something else."""
    cls = type(module)
    return cls.__module__.startswith("transformers.models.") and cls.__name__ in {f + kind for f in FAMILIES}


def is_own(module: nn.Module, kind: str) -> bool:
    """The same, without another forward in the place of its own, as Accelerate puts it: that calls the old class's."""
    return is_of(module, kind) and "forward" not in module.__dict__


def is_fused(module: nn.Module) -> bool:
    return ORIGINAL in module.__dict__


def fuse_attention(module: nn.Module, name: str, config: FP8TrainingConfig, scaling: FP8ScalingManager) -> None:
    """Run q, k and v as one product; they share the scaling rows of `name.qkv`."""
    for member in QKV:
        FP8Linear.take_over(getattr(module, member), config, scaling, f"{name}.qkv")
    take_class(module, _attention_forward)


def fuse_mlp(module: nn.Module, name: str, config: FP8TrainingConfig, scaling: FP8ScalingManager) -> None:
    """Run the MLP as one function; gate and up share the scaling rows of `name.gate_up`."""
    for member in GATE_UP:
        FP8Linear.take_over(getattr(module, member), config, scaling, f"{name}.gate_up")
    FP8Linear.take_over(module.get_submodule("down_proj"), config, scaling, f"{name}.down_proj")
    take_class(module, _mlp_forward)


def outputs_with_group(modules: dict[str, nn.Module]) -> dict[str, int]:
    """How many outputs the product has in which a linear would take part, for those that would share one."""
    found: dict[str, int] = {}
    for name, module in modules.items():
        members = QKV if is_attention(module) else GATE_UP if is_mlp(module) else ()
        total = sum(getattr(module, member).out_features for member in members)
        found |= {f"{name}.{member}": total for member in members}
    return found


def why_no_mlp(module: nn.Module) -> str:
    """Why an MLP's linears run one by one; empty if they need not."""
    if type(module.act_fn).__name__ not in ACTIVATIONS:
        return f"activation {type(module.act_fn).__name__} has no kernel"
    if any(getattr(module, member).bias is not None for member in (*GATE_UP, "down_proj")):
        return "its linears have biases"
    return ""


def fuse_loss(model: nn.Module, config: FP8TrainingConfig | None, scaling: FP8ScalingManager | None) -> None:
    """Compute head and loss in chunks; in FP8 if the configuration says so."""
    head = rows = None
    if config is not None and config.fp8_head:
        assert scaling is not None
        recipe = head_recipe(config)
        head = FP8Head(
            recipe.x,
            recipe.w,
            emulate=config.emulate is True,
            fast_forward=config.fast_accumulation != "none",
            fast_backward=config.fast_accumulation == "all",
        )
        rows = tuple(
            scaling.register(f"lm_head.{operand}", r.format, r.margin) for operand, r in (("x", head.x), ("w", head.w))
        )
    model.__dict__["_octavo_head"] = (head, rows)
    take_class(model, _causal_lm_forward)


def fuse_last_norm(model: nn.Module) -> None:
    """Compute the norm before the head in one kernel, whoever computes the head."""
    last = getattr(model.get_submodule("model"), "norm", None)
    if is_plain_norm(last) and last is not None and not is_fused(last):
        take_class(last, _norm_forward)


def head_recipe(config: FP8TrainingConfig) -> Any:
    """The head has one scale per tensor, whatever the layers have: its gradient has a constant one."""
    return config.replace(granularity="tensor", scaling=config.scaling, fp8_format="HYBRID", wgrad=None).recipe


def why_no_loss(model: Any) -> str:
    """Why a model keeps its own head and loss; empty if it need not."""
    if getattr(model.config, "final_logit_softcapping", None):
        return "final_logit_softcapping bends its logits"
    if model.lm_head.bias is not None:
        return "its head has a bias"
    if "forward" in model.__dict__:
        return f"the forward of this {type(model).__name__} was replaced by another (TRL's trainers do that)"
    if not has_default_loss(model):
        return "its loss function is not transformers' default"
    return ""


def has_default_loss(model: Any) -> bool:
    """Whether the model's loss is the one that transformers gives causal models: users may assign or derive another."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    return model.loss_function is ForCausalLMLoss


def use_fused_attention(model: Any) -> bool:
    """Have the model's attention run through `hf.attention`, where it runs through sdpa now."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        return False
    attention.register()
    model.config._attn_implementation = attention.NAME
    return True


def called_alone(model: nn.Module) -> list[str]:
    """Modules whose hooks keep a fused piece from being used."""
    found = []
    for name, module in model.named_modules():
        for part in _PARTS if is_fused(module) else ():
            child = module._modules.get(part)
            inner = child.named_modules(prefix=f"{name}.{part}".lstrip(".")) if child is not None else ()
            # The parts of a layer with adapters count, too; attention and MLP answer for their own.
            found += [
                own for own, each in inner if is_hooked(each) and (each is child or part not in ("self_attn", "mlp"))
            ]
    return found


def restore(module: nn.Module) -> None:
    """Give a module its class back."""
    original = module.__dict__.pop(ORIGINAL, None)
    if original is not None:
        change_class(module, original)
        module.__dict__.pop("_octavo_head", None)
        graphs.forget(module)
    config: Any = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) == attention.NAME:
        config._attn_implementation = "sdpa"


def _attention_forward(
    self: Any, original: Callable[..., Any], hidden_states: Tensor, *args: Any, **kwargs: Any
) -> Any:
    y = product_of_group([getattr(self, name) for name in QKV], hidden_states)
    if y is None:
        return original(self, hidden_states, *args, **kwargs)
    return original(_with_parts(self, y), hidden_states, *args, **kwargs)


def attend(module: Any, y: Tensor, hidden_states: Tensor, *, residual: Tensor | None, **kwargs: Any) -> Any:
    """A fused attention whose q, k and v are `y`, side by side. It looks at the shape alone of `hidden_states`.

    `residual`: is added by o_proj, which must be one that can (`frozen.adds_residual`).
    """
    return module.__dict__[ORIGINAL].forward(_with_parts(module, y, residual), hidden_states=hidden_states, **kwargs)


def _with_parts(module: Any, y: Tensor, residual: Tensor | None = None) -> _Computed:
    q, k, v = y.split([getattr(module, name).out_features for name in QKV], dim=-1)
    # q and k are turned by their positions, which copies them; v alone would keep all of y in memory for backward.
    return _Computed(module, (q, k, v.clone(memory_format=torch.contiguous_format)), residual)


def product_of_group(members: list[Any], x: Tensor, norm: Norm | None = None) -> Tensor | None:
    """The outputs of linears with one input, side by side; None if they have to be computed one by one.

    `norm`: x has yet to go through it.
    """
    if x.numel() == 0:
        return None
    if not all(type(member) is FP8Linear for member in members):
        return frozen.product_of_group(members, x, norm)
    if not are_one_group(members):
        return None
    biases = [member.bias for member in members]
    bias = None if biases[0] is None else torch.cat(biases)
    first, *others = members
    return linear(x, first.as_weight(*others), first.spec(x), first.states, bias=bias, norm=norm)


def are_one_group(members: Sequence[Any]) -> bool:
    """Whether trained linears can be one product: with one scaling state, and none to be called by itself."""
    return not is_hooked(*members) and all(member.row_x is members[0].row_x for member in members)


def fuse_frozen(module: nn.Module) -> str:
    """Run a frozen attention's q, k and v, or a frozen MLP's gate and up, as one product. Returns why not, if not."""
    members = [frozen.base_of(getattr(module, name)) for name in (QKV if hasattr(module, QKV[0]) else GATE_UP)]
    if not all(isinstance(member, FP8FrozenLinear) for member in members):
        return "not all of them are in FP8"
    reason = why_no_group(members)
    if not reason:
        put_together(members)
        if hasattr(module, QKV[0]):
            take_class(module, _attention_forward)
            frozen.base_of(module.o_proj).input_is_kept = True  # by the attention, whose output it is
        else:
            take_class(module, _frozen_mlp_forward)
    return reason


def why_no_frozen_mlp(module: nn.Module) -> str:
    """Why a frozen MLP's `down_proj` is a product of its own; empty if it need not be."""
    return why_no_mlp(module) or frozen.why_no_mlp(*(getattr(module, name) for name in (*GATE_UP, "down_proj")))


def _frozen_mlp_forward(self: Any, original: Callable[..., Any], x: Tensor) -> Tensor:
    members = [self.gate_proj, self.up_proj]
    activation = ACTIVATIONS.get(type(self.act_fn).__name__)
    if activation is not None and x.numel() and not is_hooked(self.act_fn):
        y = frozen.mlp(self.gate_proj, self.up_proj, self.down_proj, x, activation)
        if y is not None:
            return y
    y = product_of_group(members, x)
    if y is None:
        return original(self, x)
    gate, up = y.split([member.out_features for member in members], dim=-1)
    return self.down_proj(self.act_fn(gate) * up)


def _norm_forward(self: Any, original: Callable[..., Any], x: Tensor) -> Tensor:
    """As the original computes it, in one kernel: one by one, its steps in FP32 take more memory than any layer."""
    if x.dtype == torch.float32:
        return original(self, x)
    return self.weight * nn.functional.rms_norm(x, (x.shape[-1],), eps=self.variance_epsilon)


def _mlp_forward(self: Any, original: Callable[..., Any], x: Tensor) -> Tensor:
    y = trained_mlp(self, x) if x.numel() else None
    return original(self, x) if y is None else y


def trained_mlp(module: Any, x: Tensor, norm: Norm | None = None) -> Tensor | None:
    """A gated MLP that is trained, in one function; None if its linears have to be computed one by one."""
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    if not all(type(linear) is FP8Linear for linear in (gate, up, down)) or is_hooked(down, module.act_fn):
        return None
    if not are_one_group((gate, up)):
        return None
    mlp = MLPSpec(gate.spec(x), ACTIVATIONS[type(module.act_fn).__name__], saves_fp8=gate.config.activations == "fp8")
    return gated_mlp(x, gate.as_weight(up), down.as_weight(), mlp, gate.states, down.states, norm=norm)


def nothing_is_trained(name: str) -> str:
    return (
        f"{name} is to be trained, with labels, but none of its weights is trained: load it with full_finetuning=True, "
        "or add adapters (FastLanguageModel.get_peft_model, peft.get_peft_model). Adapters that are disabled or merged "
        "do not train: call unmerge_adapter, or leave disable_adapter"
    )


def _is_plainly_causal(config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whole sequences of one length, each in its row, and layers that look at all of what came before."""
    given = any(kwargs.get(name) is not None for name in ("attention_mask", "position_ids", "inputs_embeds"))
    kinds = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    everywhere = window is None if kinds is None else set(kinds) == {"full_attention"}
    causal = getattr(config, "is_causal", True) and not getattr(config, "use_bidirectional_attention", False)
    return not given and len(args) <= 1 and everywhere and causal and config._attn_implementation == attention.NAME


def _is_default_loss(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether what is asked for is transformers' default loss, with no argument that it might take another way."""
    return kwargs.keys() <= _INPUTS and kwargs.get("ignore_index", IGNORED) == IGNORED and has_default_loss(model)


def _causal_lm_forward(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    labels = kwargs.get("labels")
    keep = kwargs.get("logits_to_keep", 0)
    plain = type(self.lm_head) is nn.Linear and not is_hooked(self.lm_head)
    plain = plain and not kwargs.get("past_key_values") and len(args) <= 5
    whole = isinstance(keep, int) and keep == 0 and kwargs.get("return_dict") is not False
    usual = plain and whole and _is_default_loss(self, kwargs)
    if labels is None or not self.training or not torch.is_grad_enabled() or not usual:
        return original(self, *args, **kwargs)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    left_out = ("labels", "logits_to_keep", "return_dict", "ignore_index")
    kwargs = {k: v for k, v in kwargs.items() if k not in left_out}
    count, shifted = kwargs.get("num_items_in_batch"), kwargs.get("shift_labels")
    kwargs = graphs.without_full_mask(self, kwargs)
    if _is_plainly_causal(self.config, args, kwargs):
        kwargs["attention_mask"] = attention.plainly_causal(self.lm_head.weight)
    hidden = graphs.replayed(self, args, kwargs)
    outputs: Any = None
    if hidden is None:
        outputs = self.model(*args, **kwargs)
        hidden = outputs.last_hidden_state
    if shifted is None:
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    head, rows = self._octavo_head
    if not hidden.requires_grad and not self.lm_head.weight.requires_grad:
        raise ValueError(nothing_is_trained(type(self).__name__))
    loss = linear_cross_entropy(
        hidden, self.lm_head.weight, shifted.to(hidden.device), count=count, head=head, rows=rows
    )
    output: Any = CausalLMOutputWithPast  # its fields are annotated with legacy tensor classes
    return output(
        loss=loss,
        logits=None,
        past_key_values=getattr(outputs, "past_key_values", None),
        hidden_states=getattr(outputs, "hidden_states", None),
        attentions=getattr(outputs, "attentions", None),
    )
