"""The head and the loss of a fused causal language model: cross entropy in chunks of tokens.

While training with labels, the model returns the loss and no logits. Every other call runs transformers' forward:
without labels, without gradients, with a cache that is being filled, with a loss that is not the default. The report
counts calls with labels of which the loss was not computed here. A head that is to run in FP8 and cannot is an error.
"""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from octavo.decoders import ragged
from octavo.decoders.backbone import POSITIONAL, hidden_states
from octavo.decoders.classes import HEAD, UNFUSED
from octavo.decoders.gathering import around
from octavo.decoders.hooks import is_hooked
from octavo.decoders.match import has_default_loss, is_head
from octavo.decoders.rehearsal import followed_by
from octavo.dist.parallel import head_loss
from octavo.nn.loss import FP8Head, linear_cross_entropy
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


def nothing_is_trained(name: str, by: str = "with labels") -> str:
    """The error for a model of class `name` that is to be trained and has no weight to train."""
    return (
        f"{name} is to be trained, {by}, but none of its weights is trained: load it with full_finetuning=True, "
        "or add adapters (FastLanguageModel.get_peft_model, peft.get_peft_model). Adapters that are disabled or merged "
        "do not train: call unmerge_adapter, or leave disable_adapter"
    )


def causal_lm_forward(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    named = dict(zip(POSITIONAL, args, strict=False)) | kwargs
    labels = kwargs.get("labels")
    if labels is None or not self.training or not torch.is_grad_enabled():
        return packed_forward(self, original, *args, **kwargs)
    head, states = getattr(self, HEAD)
    reason = _why_no_head(self.lm_head)
    if reason and head is not None:
        raise ValueError(
            f"fp8_head=True: {reason}, so its product would be in high precision. Convert with fp8_head=False and "
            "'lm_head' in skip, the default"
        )
    reason = reason or _why_other_loss(self, args, kwargs)
    if reason:
        _note_unfused(self, reason)
        return packed_forward(self, original, *args, **kwargs)
    from transformers.modeling_outputs import CausalLMOutputWithPast

    left_out = ("labels", "logits_to_keep", "return_dict", "ignore_index")
    named = {k: v for k, v in named.items() if k not in left_out}
    count, shifted = named.get("num_items_in_batch"), named.get("shift_labels")
    if shifted is None:
        shifted = nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
    # Dynamo does not know context variables, and hooks must not see a rehearsal.
    unseen = not torch.compiler.is_compiling() and not is_hooked(self.model.norm)
    with followed_by(lambda h: _loss_like(self, h)) if unseen else nullcontext():
        hidden, outputs, kept = hidden_states(self, named, shifted)
    if count is not None and kept is not shifted:
        count = _count_of(kept, shifted, count)
    if not hidden.requires_grad and not self.lm_head.weight.requires_grad:
        raise ValueError(nothing_is_trained(type(self).__name__))

    def loss_of(hidden: Tensor) -> Tensor:
        return head_loss(self.lm_head, hidden, kept.to(hidden.device), count=count, head=head, states=states)

    loss = around([self.lm_head], loss_of, hidden)
    output: Any = CausalLMOutputWithPast  # its fields are annotated with legacy tensor classes
    return output(
        loss=loss,
        logits=None,
        past_key_values=getattr(outputs, "past_key_values", None),
        hidden_states=getattr(outputs, "hidden_states", None),
        attentions=getattr(outputs, "attentions", None),
    )


def _loss_like(model: Any, hidden: Tensor) -> Tensor:
    """A loss by the same kernels as the model's, for a rehearsal: of no labels in particular, and of no effect."""
    head, states = getattr(model, HEAD)
    labels = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    states = states and tuple(state.clone() for state in states)
    return linear_cross_entropy(model.model.norm(hidden), model.lm_head.weight, labels, head=head, states=states)


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


def _why_no_head(head: Any) -> str:
    """Why the weight of a head cannot be multiplied but by calling it; empty if it can."""
    if not is_head(head):
        return f"lm_head is a {type(head).__name__}"
    return "lm_head has hooks" if is_hooked(head) and style_of(head) is None else ""


def _why_other_loss(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a call with labels asks for more than transformers' default loss, or for it another way; empty if not."""
    named = dict(zip(POSITIONAL, args, strict=False)) | kwargs
    if len(args) > len(POSITIONAL):
        return "labels by position"
    if named.get("past_key_values") is not None:
        return "a cache is given"
    kept = kwargs.get("logits_to_keep", 0)
    if not isinstance(kept, int) or kept != 0:
        return "logits_to_keep is given"
    if kwargs.get("return_dict") is False:
        return "return_dict=False"
    unknown = sorted(kwargs.keys() - _INPUTS)
    if unknown:
        return f"{unknown[0]} is given, which its loss may take"
    default = kwargs.get("ignore_index", IGNORED) == IGNORED and has_default_loss(model)
    return "" if default else "its loss is not transformers' default"


def _note_unfused(model: nn.Module, reason: str) -> None:
    """Count a call with labels whose loss is computed from all logits."""
    if not torch.compiler.is_compiling():
        model.__dict__.setdefault(UNFUSED, Counter())[reason] += 1
