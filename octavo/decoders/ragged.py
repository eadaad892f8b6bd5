"""Batches without padding: the real tokens of all rows as one flat row, with the offsets of their sequences.

    ids    7 3 9 . .          flat      7 3 9 4 2 8 5 1 0 0 0
           4 2 8 5 1   →      offsets   0     3         8     11

A row of a batch may hold one sequence and padding on either side, or several sequences that `position_ids` tell apart.
Layers then compute nothing for padding, and attention sees each sequence alone (`attention.py`). The number of rows is
rounded up, so that kernels, GEMMs and the allocator meet few shapes. The rows that fill it up are zeros, and a sequence
of their own at the end. They stay zero through layers without biases, so that they change no scale, and have no part in
outputs and gradients.

Where sequences begin is found on the host. So a mask or positions that are on a GPU are waited for, as transformers
does at the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from octavo.decoders import attention
from octavo.decoders.hooks import is_watched
from octavo.numerics.cross_entropy import IGNORED

_FEWEST_ROWS = 64  # rows are rounded up to a multiple of it, and of a 16th of the power of two below


@dataclass(frozen=True)
class Ragged:
    """Real tokens of a batch. `index[T]`: where each is in the batch, rows one after another; `rows`: T rounded up.

    `offsets[N + 1]`: where each sequence begins, as int32; `longest`: its tokens. Both count the rows at the end that
    belong to no token.
    """

    index: Tensor
    offsets: Tensor
    longest: int
    rows: int

    def gather(self, x: Tensor) -> Tensor:
        """Values of the batch `[B, S, ...]` for the real tokens, `[1, rows, ...]`; zeros for the rows at the end."""
        return self._fill(x.flatten(0, 1).index_select(0, self.index), 0.0)

    def gather_ids(self, ids: Tensor, *, rest: int) -> Tensor:
        """Integers of the batch `[B, S]` for the real tokens, `[1, rows]`."""
        return self._fill(ids.flatten().to(self.index.device).index_select(0, self.index), rest)

    def embed(self, embedding: Any, ids: Tensor) -> Tensor:
        """Embeddings `[1, rows, H]` of the real tokens among ids `[B, S]`; zeros for the rows at the end."""
        ids = ids.flatten().to(self.index.device).index_select(0, self.index)
        return self._fill(embedding(ids[None])[0], 0.0)

    def _fill(self, flat: Tensor, value: float) -> Tensor:
        rest = self.rows - len(flat)
        return (pad(flat, (*(0, 0) * (flat.dim() - 1), 0, rest), value=value) if rest else flat)[None]

    def scatter(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        """Values `[1, rows, H]` of the real tokens, where those are in a batch `[B, S, H]`; zeros elsewhere."""
        batch, length = shape
        values = flat[0, : len(self.index)]
        whole = values.new_zeros(batch * length, values.shape[1])
        return whole.index_copy(0, self.index.to(values.device), values).unflatten(0, (batch, length))

    def keywords(self) -> dict[str, Any]:
        """The offsets under the names that transformers passes on to attention."""
        return {
            "cu_seq_lens_q": self.offsets, "cu_seq_lens_k": self.offsets,
            "max_length_q": self.longest, "max_length_k": self.longest,
        }  # fmt: skip


class Layout(NamedTuple):
    """The sequences of a batch. `ragged`: None if every row is one sequence of full length.

    `why_padded`: why the batch has to be computed with its padding; empty if it need not. `is_plain`: whether attention
    is causal within sequences, and nothing else.
    """

    ragged: Ragged | None = None
    why_padded: str = ""
    is_plain: bool = True


def layout_of(
    shape: Sequence[int],
    mask: Tensor | None,
    positions: Tensor | None,
    offsets: Tensor | None,
    labels: Tensor | None,
    device: torch.device,
) -> Layout:
    """Find the sequences of a batch `[B, S]`.

    `mask`: one for real tokens; `positions` that restart where a sequence begins; `offsets` where they begin, for a
    batch of one row; `labels`, already shifted, or None if padding is known
    to have none. `device`: where the result is to be.
    """
    batch, length = shape
    for name, given in (("attention_mask", mask), ("position_ids", positions)):
        if given is not None and not isinstance(given, Tensor):
            return Layout(why_padded=f"{name} is a {type(given).__name__}", is_plain=False)
        if given is not None and (given.dim() != 2 or given.shape[1] != length or given.shape[0] not in (1, batch)):
            return Layout(why_padded=f"{name} has shape {tuple(given.shape)}")
    real = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask.cpu().bool().expand(batch, length)
    index = real.flatten().nonzero().squeeze(1)
    if len(index) == 0:
        return Layout(why_padded="a batch is nothing but padding")
    begins = (index // length).diff() != 0
    if (index.diff()[~begins] != 1).any():
        return Layout(why_padded="attention_mask leaves out tokens within a row")
    if (
        mask is not None
        and labels is not None
        and _trains_padding(labels.reshape(batch, length), mask.bool().to(labels.device))
    ):
        return Layout(why_padded=f"padding has labels other than {IGNORED}")
    if positions is not None:
        moves = positions.cpu().expand(batch, length).flatten()[index].diff()
        # Without a mask, as transformers has it: any move but one forward. With one, positions may leave numbers out.
        begins |= moves != 1 if mask is None else moves <= 0
    if offsets is not None and batch == 1 and (positions is None or len(index) == length):
        begins |= torch.isin(index[1:], offsets.cpu())  # positions may run on through a row
    starts = [0, *(begins.nonzero().squeeze(1) + 1).tolist()]
    if len(index) == batch * length and len(starts) == batch:
        return Layout()
    return Layout(_ragged(index, starts, device))


def _trains_padding(labels: Tensor, real: Tensor) -> bool:
    """Whether padding is to be predicted from padding.

    Padding before a row has the row's first token for its label, once that is shifted. It is left out like the padding:
    nothing came before that token, and a row that is padded on the right does not train it either.
    """
    before_token = pad(real, (0, 1))[:, 1:]
    return bool(((labels != IGNORED) & ~real & ~before_token).any())


def _ragged(index: Tensor, starts: list[int], device: torch.device) -> Ragged:
    tokens = len(index)
    step = max(_FEWEST_ROWS, 1 << max(0, tokens.bit_length() - 5))
    rows = -(-tokens // step) * step
    offsets = torch.tensor([*starts, tokens, *([rows] if rows > tokens else [])], dtype=torch.int32)
    return Ragged(
        index=index.to(device, non_blocking=True),
        offsets=offsets.to(device, non_blocking=True),
        longest=int(offsets.diff().max()),
        rows=rows,
    )


def told_apart(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments to change in a call of transformers' layers, so that they tell packed sequences apart.

    With a cache, which models have by default, or with a mask, they take all sequences of a row for one; offsets they
    only pass on. Without either, a sequence begins where positions do not go on by one. So padding, whose mask is left
    out, has the position of the token before it (before the first token, of that), and each is a sequence of its own.
    """
    tokens = kwargs.get("input_ids") if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
    mask, given, offsets = (kwargs.get(name) for name in ("attention_mask", "position_ids", "cu_seq_lens_q"))
    cached = kwargs.get("use_cache") or kwargs.get("past_key_values") is not None or attention.is_paged(kwargs)
    if cached or tokens is None or (given is None and offsets is None) or torch.compiler.is_compiling():
        return {}
    shape = tokens.shape[:2]
    if not (_is_flat(mask, shape) and _is_flat(given, shape)):
        return {}
    real = None if mask is None else mask.bool().expand(shape)
    positions = None if given is None else given.expand(shape)
    if isinstance(offsets, Tensor) and shape[0] == 1 and (given is None or real is None or bool(real.all())):
        positions = _by_offsets(positions, offsets.to(tokens.device).long(), shape[1])
    if positions is None:
        return {}
    packed = bool((positions.diff(dim=1) != 1).any())
    if real is not None:
        packed, positions = _without_mask(positions, real.to(positions.device))
    return {"use_cache": False, "attention_mask": None, "position_ids": positions} if packed else {}


def _by_offsets(positions: Tensor | None, offsets: Tensor, length: int) -> Tensor:
    """Positions `[1, S]` that restart at offsets; those that are given, if they do."""
    places = torch.arange(length, device=offsets.device)
    restarting = (places - offsets[torch.bucketize(places, offsets, right=True) - 1])[None]
    if positions is None:
        return restarting
    runs_on = (restarting.diff() != 1) & (positions.to(offsets.device).diff() == 1)
    return restarting if bool(runs_on.any()) else positions


def _is_flat(given: Any, shape: Sequence[int]) -> bool:
    """Whether a mask or positions have one number for each token, or are not given."""
    if given is None:
        return True
    return isinstance(given, Tensor) and given.dim() == 2 and given.shape[1] == shape[1] and len(given) in (1, shape[0])


def _without_mask(positions: Tensor, real: Tensor) -> tuple[bool, Tensor]:
    """Whether rows hold several sequences, and positions that tell them and padding apart without a mask.

    Padding within a sequence has to stay masked: then the sequences of that batch are not told apart.
    """
    places = torch.arange(real.shape[1], device=real.device).expand_as(real)
    last = places.where(real, -1).cummax(dim=1).values  # the place of the last token, up to here
    first = real.long().argmax(dim=1, keepdim=True)
    earlier = pad(last, (1, 0), value=-1)[:, :-1]
    follows = real & (earlier >= 0)
    restarts = follows & (positions <= positions.gather(1, earlier.clamp(min=0)))
    has_holes = follows & ~restarts & (places - earlier > 1)
    return bool(restarts.any() & ~has_holes.any()), positions.gather(1, last.where(last >= 0, first))


def why_not_plain(model: Any) -> str:
    """Why attention of a model is not causal within sequences and windows alone, or not ours; empty if it is both."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds or getattr(config, "use_bidirectional_attention", False) or not getattr(config, "is_causal", True):
        return "its attention is not causal alone"
    for each in attention.configs_of(model):
        if each._attn_implementation != attention.NAME:
            return f"its attention is {each._attn_implementation}, not {attention.NAME}"
    return ""


def why_padded(model: Any, kwargs: dict[str, Any]) -> str:
    """Why the layers of this model must see a batch as it was given; empty if they may see real tokens alone."""
    config = model.config
    if getattr(config, "attn_logit_softcapping", None):
        return "attn_logit_softcapping bends its scores"
    asked = ("output_hidden_states", "output_attentions")
    if any(kwargs.get(name) or (kwargs.get(name) is None and getattr(config, name, False)) for name in asked):
        return "hidden states or attentions are asked for"
    if kwargs.get("use_cache"):
        return "a cache is asked for (use_cache=True)"
    watched = is_watched(model.model)
    return f"{watched} has hooks, which see hidden states" if watched else why_not_plain(model)
