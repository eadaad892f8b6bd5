"""The head and the loss of a fused causal language model: cross entropy in chunks of tokens.

While training with labels, the model returns the loss and no logits. Every other call runs transformers' forward:
without labels, without gradients, with a cache that is being filled, with a loss that is not the default.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.decoders import ragged
from octavo.decoders.backbone import POSITIONAL, hidden_states
from octavo.decoders.classes import HEAD
from octavo.decoders.hooks import is_hooked
from octavo.decoders.match import has_default_loss
from octavo.dist.parallel import head_loss
from octavo.nn.loss import FP8Head
from octavo.nn.styles import style_of
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.config import Recipe
from octavo.numerics.cross_entropy import IGNORED

# Arguments of causal models that transformers' default loss takes as we do, or has no use for.
_INPUTS = {
    "input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds", "labels", "use_cache",
    "logits_to_keep", "return_dict", "output_hidden_states", "output_attentions", "output_router_logits",
    "num_items_in_batch", "shift_labels", "ignore_index", "is_causal", "seq_idx",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
}  # fmt: skip


def add_head(model: nn.Module, config: FP8TrainingConfig | None, scaling: FP8ScalingManager | None) -> None:
    """Give a model what `causal_lm_forward` needs: a head in FP8 if the configuration says so, else none."""
    head = states = None
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
        states = tuple(
            scaling.register(f"lm_head.{operand}", r.format, r.margin) for operand, r in (("x", head.x), ("w", head.w))
        )
    model.__dict__[HEAD] = (head, states)


def head_recipe(config: FP8TrainingConfig) -> Recipe:
    """The head's recipe: one scale per tensor, whatever the layers have, because its gradient has a constant one."""
    return config.replace(granularity="tensor", scaling=config.scaling, fp8_format="HYBRID", wgrad=None).recipe


def nothing_is_trained(name: str) -> str:
    """The error for a model of class `name` that is given labels and has no weight to train."""
    return (
        f"{name} is to be trained, with labels, but none of its weights is trained: load it with full_finetuning=True, "
        "or add adapters (FastLanguageModel.get_peft_model, peft.get_peft_model). Adapters that are disabled or merged "
        "do not train: call unmerge_adapter, or leave disable_adapter"
    )


def causal_lm_forward(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    named = dict(zip(POSITIONAL, args, strict=False)) | kwargs
    logits_to_keep = kwargs.get("logits_to_keep", 0)
    plain = type(self.lm_head) is nn.Linear and (not is_hooked(self.lm_head) or style_of(self.lm_head) is not None)
    plain = plain and named.get("past_key_values") is None and len(args) <= len(POSITIONAL)
    whole = isinstance(logits_to_keep, int) and logits_to_keep == 0 and kwargs.get("return_dict") is not False
    usual = plain and whole and _is_default_loss(self, kwargs)
    labels = kwargs.get("labels")
    if labels is None or not self.training or not torch.is_grad_enabled() or not usual:
        return packed_forward(self, original, *args, **kwargs)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    left_out = ("labels", "logits_to_keep", "return_dict", "ignore_index")
    named = {k: v for k, v in named.items() if k not in left_out}
    count, shifted = named.get("num_items_in_batch"), named.get("shift_labels")
    if shifted is None:
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    hidden, outputs, kept = hidden_states(self, named, shifted)
    if count is not None and kept is not shifted:
        count = _count_of(kept, shifted, count)
    head, states = getattr(self, HEAD)
    if not hidden.requires_grad and not self.lm_head.weight.requires_grad:
        raise ValueError(nothing_is_trained(type(self).__name__))
    loss = head_loss(self.lm_head, hidden, kept.to(hidden.device), count=count, head=head, states=states)
    output: Any = CausalLMOutputWithPast  # its fields are annotated with legacy tensor classes
    return output(
        loss=loss,
        logits=None,
        past_key_values=getattr(outputs, "past_key_values", None),
        hidden_states=getattr(outputs, "hidden_states", None),
        attentions=getattr(outputs, "attentions", None),
    )


def packed_forward(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """transformers' forward, which tells packed sequences apart."""
    named = dict(zip(POSITIONAL, args, strict=False)) | kwargs
    apart = ragged.told_apart(named) if len(args) <= len(POSITIONAL) else {}
    return original(self, **named | apart) if apart else original(self, *args, **kwargs)


def _count_of(kept: Tensor, labels: Tensor, count: Tensor | int) -> Tensor:
    """The count of items without those that were left out with padding: first tokens of rows padded on the left.

    Whoever counted, for all micro-batches of a step, counted them, too. So the count shrinks by their share here.
    """
    before, after = ((x != IGNORED).sum().float() for x in (labels, kept))
    share = torch.where(after > 0, after.to(before.device) / before.clamp(min=1), 1.0)
    return torch.as_tensor(count, device=share.device) * share


def _is_default_loss(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the call asks for transformers' default loss, with no argument that it might take another way."""
    return kwargs.keys() <= _INPUTS and kwargs.get("ignore_index", IGNORED) == IGNORED and has_default_loss(model)
