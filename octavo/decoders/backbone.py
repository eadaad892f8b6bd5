"""The layers of a fused causal language model: with CUDA graphs, without padding, or as they were called.

`hidden_states` is for the model's own loss, which takes the states of real tokens as they come. `backbone_forward` is
for callers that compute a loss of their own from hidden states `[B, S, H]`, as TRL's trainers do: states of real tokens
are put where they belong, and those of padding are zero. That is done for callers alone that are known to ignore them.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from octavo.decoders import attention, graphs, ragged
from octavo.decoders.classes import CAUSAL, PADDED
from octavo.nn.sharded import local
from octavo.numerics.cross_entropy import IGNORED

POSITIONAL = ("input_ids", "attention_mask", "position_ids", "past_key_values", "inputs_embeds")  # in this order
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def hidden_states(model: Any, kwargs: dict[str, Any], labels: Tensor) -> tuple[Tensor, Any, Tensor]:
    """The last hidden states, the decoder's other outputs, and the labels of those states.

    Other outputs are None where a CUDA graph is replayed. Without padding, states and labels are those of real tokens.
    """
    kwargs = {"use_cache": False} | kwargs  # a cache is of no use in training, and k and v would be copied into it
    layout = _layout(model, kwargs, labels)
    if layout.why_padded:
        _note_padded(model, layout.why_padded)
        kwargs = kwargs | ragged.told_apart(kwargs)
    elif layout.ragged is not None:
        outputs = model.model(**_flat(model, kwargs, layout.ragged))
        return outputs.last_hidden_state, outputs, layout.ragged.gather_ids(labels, rest=IGNORED)
    elif layout.is_plain:
        kwargs = _plain(model, kwargs)
    hidden = graphs.replayed(model, kwargs)
    if hidden is not None:
        return hidden, None, labels
    outputs = model.model(**kwargs)
    return outputs.last_hidden_state, outputs, labels


def backbone_forward(self: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    attention.refuse_distributed(self.config)
    model = self.__dict__[CAUSAL]()
    named = dict(zip(POSITIONAL, args, strict=False)) | kwargs
    mask = named.get("attention_mask")
    ours = isinstance(mask, Tensor) and mask.numel() == 0
    if (
        model is None
        or ours
        or attention.is_paged(named)
        or named.get("past_key_values") is not None
        or not _ignores_padding(model)
    ):
        return original(self, *args, **kwargs)
    layout = _layout(model, named, None)
    if layout.why_padded:
        _note_padded(model, layout.why_padded)
        return original(self, **named | ragged.told_apart(named))
    if layout.ragged is not None:
        outputs = original(self, **_flat(model, named, layout.ragged))
        tokens = named["input_ids"] if named.get("inputs_embeds") is None else named["inputs_embeds"]
        outputs.last_hidden_state = layout.ragged.scatter(outputs.last_hidden_state, tokens.shape[:2])
        return outputs
    if layout.is_plain:
        return original(self, **_plain(model, named))
    return original(self, *args, **kwargs)


def _ignores_padding(model: nn.Module) -> bool:
    """Whether whoever calls the layers has no use for padding: TRL's trainers, which give it no labels."""
    function = getattr(model.__dict__.get("forward"), "__func__", None)
    origin = getattr(function, "__globals__", {}).get("__name__", "")  # `__module__` is that of the forward it wraps
    return bool(origin.startswith("trl."))


def _layout(model: Any, kwargs: dict[str, Any], labels: Tensor | None) -> ragged.Layout:
    """The sequences of a batch, and whether its layers may see them without padding."""
    mask, positions, offsets = (kwargs.get(name) for name in ("attention_mask", "position_ids", "cu_seq_lens_q"))
    if mask is None and positions is None and offsets is None:
        return ragged.Layout(is_plain=not ragged.why_not_plain(model))
    if torch.compiler.is_compiling():  # where sequences begin is data, which a graph cannot depend on
        return ragged.Layout(why_padded="the whole model is compiled", is_plain=False)
    reason = ragged.why_padded(model, kwargs)
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    if reason or tokens is None:
        return ragged.Layout(why_padded=reason, is_plain=False)
    device = model.get_input_embeddings().weight.device
    return ragged.layout_of(tokens.shape[:2], mask, positions, offsets, labels, device)


def _plain(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for rows that are one sequence each, of full length."""
    kwargs = {name: value for name, value in kwargs.items() if name not in _OFFSETS}
    return kwargs | {"attention_mask": attention.plainly_causal(local(model.lm_head.weight.detach()))}


def _flat(model: Any, kwargs: dict[str, Any], batch: ragged.Ragged) -> dict[str, Any]:
    """Arguments for the real tokens of a batch, as one row."""
    ids, embeddings, positions = (kwargs.get(name) for name in ("input_ids", "inputs_embeds", "position_ids"))
    if embeddings is None:
        assert ids is not None
        shape = ids.shape
        embeddings = batch.embed(model.get_input_embeddings(), ids)
    else:
        shape = embeddings.shape[:2]
        embeddings = batch.gather(embeddings)
    if positions is None:
        positions = torch.arange(shape[1], device=embeddings.device)[None]
    given = {name: value for name, value in kwargs.items() if name not in POSITIONAL}
    return given | batch.keywords() | {
        "inputs_embeds": embeddings,
        "attention_mask": attention.plainly_causal(embeddings),
        "position_ids": batch.gather_ids(positions.expand(shape), rest=0),
        "use_cache": False,
    }  # fmt: skip


def _note_padded(model: nn.Module, reason: str) -> None:
    """Count a call that computes padding."""
    if torch.compiler.is_compiling():
        return
    model.__dict__.setdefault(PADDED, Counter())[reason] += 1
