"""The driver that fuses a decoder, one for trained and for frozen weights, and what it writes into the report.

    fuse_products   q, k and v as one product, the MLP as one function, norms joined to the products that follow them
    fuse_loss       head and loss in chunks, the norm before them in one kernel, attention on cuDNN

`Trained` and `Frozen` are the two kinds of weights: each knows which pieces of a model have it, and how one is fused.
The driver walks the model, counts the pieces, and writes the sentences of `report.fused`.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import nn

from octavo.decoders import attention, graphs, match, ragged
from octavo.decoders.backbone import backbone_forward
from octavo.decoders.causal_lm import add_head, causal_lm_forward, head_recipe, packed_forward
from octavo.decoders.classes import CAUSAL, HEAD, PADDED, UNFUSED, Owner, give_class_back, is_fused, take_class
from octavo.decoders.forwards import (
    attention_forward,
    joins_norm,
    joins_norms,
    layer_forward,
    mlp_forward,
    norm_forward,
)
from octavo.decoders.hooks import is_hooked
from octavo.decoders.match import GATE_UP, HEAD_NORMS, MLP, NORMS, QKV, base_of
from octavo.decoders.products import why_no_frozen_mlp
from octavo.dist.parallel import is_parallel
from octavo.nn.frozen import FP8FrozenLinear
from octavo.nn.groups import put_together, why_no_group
from octavo.nn.linear import FP8Linear
from octavo.nn.model_report import report_of
from octavo.nn.report import FP8, REPORT, ConversionReport, dtype_name
from octavo.nn.styles import style_of
from octavo.nn.walk import modules_of
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig

# Children of fused modules that those do not call, but compute themselves.
_FUSED_CHILDREN = (*QKV, *HEAD_NORMS, "o_proj", *MLP, "act_fn", "lm_head", "self_attn", "mlp", *NORMS)
_JOINED = "norms with the products that follow them"
_APART_PARALLEL = "norms apart from the products that follow them: those are tensor-parallel"
_APART = "norms apart from the products that follow them: those have several scales for x"


class Piece(NamedTuple):
    """An attention or an MLP of a decoder, with its name in the model."""

    name: str
    module: Any


class Outcome(NamedTuple):
    """The sentence about one piece. `counted`: written once for all pieces of which it is true, with their number."""

    what: str
    counted: bool = True


_ONE_PRODUCT = Outcome("q, k and v in one product")
_ONE_FUNCTION = Outcome("MLP with its activation in one function")


class Weights(Protocol):
    """One kind of weights of a decoder.

    `config`, `scaling`: those of its linears; None where nothing is computed in FP8. `head_dtype`: the precision of a
    head that is not in FP8. `fuse_attention` and `fuse_mlp` fuse a piece; None if its weights are of another kind.
    `why_norms_apart`: why norms are not joined to products; None if they are, empty where that goes without saying.
    """

    @property
    def config(self) -> FP8TrainingConfig | None: ...
    @property
    def scaling(self) -> FP8ScalingManager | None: ...
    @property
    def head_dtype(self) -> str: ...
    def fuse_attention(self, piece: Piece) -> Outcome | None: ...
    def fuse_mlp(self, piece: Piece) -> Outcome | None: ...
    def why_norms_apart(self) -> str | None: ...


@dataclass(frozen=True)
class Trained:
    """Weights that are trained. `linears`: names of those whose products are to run in FP8."""

    config: FP8TrainingConfig | None
    scaling: FP8ScalingManager | None
    linears: frozenset[str] = frozenset()
    head_dtype: str = "BF16"

    def fuse_attention(self, piece: Piece) -> Outcome | None:
        if not self._has(piece, QKV):
            return None
        self._convert(piece, QKV, "qkv")
        take_class(piece.module, attention_forward)
        return _ONE_PRODUCT

    def fuse_mlp(self, piece: Piece) -> Outcome | None:
        if not self._has(piece, MLP):
            return None
        reason = match.why_no_mlp(piece.module)
        if reason:
            return Outcome(f"{piece.name} not fused: {reason}", counted=False)
        self._convert(piece, GATE_UP, "gate_up")
        self._convert(piece, MLP[2:], "down_proj")
        take_class(piece.module, mlp_forward)
        return _ONE_FUNCTION

    def why_norms_apart(self) -> str | None:
        if self.config is None or self.config.activations != "fp8":
            return ""
        return None if joins_norm(self.config, self.config.recipe) else _APART

    def _has(self, piece: Piece, members: tuple[str, ...]) -> bool:
        return all(f"{piece.name}.{member}" in self.linears for member in members)

    def _convert(self, piece: Piece, members: tuple[str, ...], group: str) -> None:
        """Make FP8 linears of the members, which share the scaling state of the group."""
        assert self.config is not None and self.scaling is not None
        for member in members:
            linear = getattr(piece.module, member)
            FP8Linear.convert_in_place(linear, self.config, self.scaling, f"{piece.name}.{group}")


class Frozen:
    """Weights that are frozen in FP8. A model may have none: then nothing of it is computed in FP8."""

    def __init__(self, model: nn.Module) -> None:
        self.linears = [module for module in model.modules() if isinstance(module, FP8FrozenLinear)]
        self.config = self.linears[0].config if self.linears else None
        self.scaling = self.linears[0].scaling if self.linears else None
        heads: list[Any] = [module.lm_head for module in model.modules() if match.is_causal_lm(module)]
        dtype = dtype_name(heads[0].weight) if heads else ""
        self.head_dtype = "BF16" if dtype == "bfloat16" else dtype

    def fuse_attention(self, piece: Piece) -> Outcome | None:
        reason = self._join(piece, QKV)
        if reason is None or reason:
            return Outcome(f"q, k and v one by one: {reason}") if reason else None
        take_class(piece.module, attention_forward)
        base_of(piece.module.o_proj).input_is_saved = True  # by the attention, whose output it is
        return _ONE_PRODUCT

    def fuse_mlp(self, piece: Piece) -> Outcome | None:
        reason = self._join(piece, GATE_UP)
        if reason is None or reason:
            return Outcome(f"gate and up one by one: {reason}") if reason else None
        take_class(piece.module, mlp_forward)
        members = (getattr(piece.module, member) for member in MLP)
        apart = match.why_no_mlp(piece.module) or why_no_frozen_mlp(*members)
        return Outcome(f"gate and up in one product, down apart: {apart}") if apart else _ONE_FUNCTION

    def why_norms_apart(self) -> None:
        return None

    def _join(self, piece: Piece, names: tuple[str, ...]) -> str | None:
        """Put the weights of a group side by side. Returns why not, if not; None if not all of them are frozen."""
        members = [base_of(getattr(piece.module, name)) for name in names]
        if not all(isinstance(member, FP8FrozenLinear) for member in members):
            return None
        reason = why_no_group(members)
        if not reason:
            put_together(members)
        return reason


def fuse_products(modules: Mapping[str, nn.Module], report: ConversionReport, weights: Weights) -> None:
    """Fuse the attentions, MLPs and layers among these modules whose weights are of this kind."""
    counts = Counter({_ONE_PRODUCT.what: 0, _ONE_FUNCTION.what: 0})  # in the order in which they are written
    for piece in map(Piece._make, modules.items()):
        if match.is_attention(piece.module):
            outcome = weights.fuse_attention(piece)
        else:
            outcome = weights.fuse_mlp(piece) if match.is_mlp(piece.module) else None
        if outcome is not None and outcome.counted:
            counts[outcome.what] += 1
        elif outcome is not None:
            report.fused.append(outcome.what)
    layers: list[Any] = [module for module in modules.values() if match.is_layer(module)]
    layers = [layer for layer in layers if is_fused(layer.self_attn) or is_fused(layer.mlp)]
    apart = weights.why_norms_apart()
    if apart is None and any(is_parallel(base_of(layer.self_attn.q_proj)) for layer in layers):
        apart = _APART_PARALLEL
    for layer in layers:
        take_class(layer, layer_forward)
    if apart is None:
        counts[_JOINED] = len(layers)
    if any(is_fused(module) for module in modules.values()):
        for norm in filter(match.is_shifted_norm, modules.values()):
            take_class(norm, norm_forward)  # those of layers that keep their own forward
    report.fused += [f"{what} ({count})" for what, count in counts.items() if count]
    if apart and layers:
        report.fused.append(apart)


def fuse_loss(modules: Mapping[str, nn.Module], report: ConversionReport, weights: Weights) -> bool:
    """Fuse head and loss of the causal language models among these modules. Returns whether there is one."""
    models = {name: module for name, module in modules.items() if match.is_causal_lm(module)}
    for name, model in models.items():
        _fuse_final_norm(model)
        reason = match.why_no_loss(model)
        if reason:
            report.fused.append(f"loss not fused: {reason}")
            if "forward" not in model.__dict__:
                take_class(model, packed_forward)
        else:
            add_head(model, weights.config, weights.scaling)
            take_class(model, causal_lm_forward)
            fp8_head = weights.config is not None and weights.config.fp8_head
            head = FP8.upper() if fp8_head else weights.head_dtype
            report.fused.append(f"head and loss in chunks, head in {head}")
            if weights.config is not None and fp8_head:
                _note_head(report, f"{name}.lm_head".lstrip("."), weights.config)
        if _use_fused_attention(model):
            report.fused.append("attention on cuDNN where it applies")
            take_class(model.model, backbone_forward)
            model.model.__dict__[CAUSAL] = Owner(model)
            if not reason and not ragged.why_padded(model, {}):
                report.fused.append(
                    "no padding while training, unless the whole model is compiled: layers see real tokens alone"
                )
    return bool(models)


def fuse_frozen(model: nn.Module, report: ConversionReport) -> None:
    """Fuse the products of a base frozen in FP8: each gives what the modules would give, one by one."""
    frozen = Frozen(model)
    fuse_products(dict(model.named_modules()), report, frozen)
    dequantized = sum(not linear.fp8_products for linear in frozen.linears)
    if dequantized:
        report.fused.append(f"products in high precision, by FP8 weights ({dequantized})")
    in_backward = sum(linear.fp8_products and not linear.fp8_forward for linear in frozen.linears)
    if in_backward:
        report.fused.append(f"FP8 products in backward alone ({in_backward})")


def fuse_loaded(model: nn.Module) -> ConversionReport:
    """Fuse a loaded model whose weights are not trained in FP8. Returns its report.

    One that has a report already was fused while it was loaded (`hf/quantizer.py`).
    """
    report: ConversionReport | None = model.__dict__.get(REPORT)
    if report is None:
        report = report_of(model)
        attach(report, model)
        fuse_all(model, report)
    return report


def fuse_all(model: nn.Module, report: ConversionReport) -> None:
    """Fuse products, head and loss of a model whose weights are not trained in FP8.

    The head of a base frozen in FP8 is in FP8 if the configuration of its linears says so.
    """
    fuse_frozen(model, report)
    if not fuse_loss(dict(model.named_modules()), report, Frozen(model)):
        report.fused.append(f"nothing fused: {type(model).__name__} is not one of {', '.join(match.FAMILIES)}")


@contextmanager
def fused_for_decoding(model: nn.Module) -> Iterator[None]:
    """Fuse what is not fused already and can be without FP8, as long as a model generates: norms, rotation, cache."""
    forwards: dict[str, Callable[..., Any]] = {
        "Attention": attention_forward,
        "MLP": mlp_forward,
        "DecoderLayer": layer_forward,
        "RMSNorm": norm_forward,
    }
    taken = []
    try:
        for module in modules_of(model):
            for kind, forward in forwards.items():
                own = match.is_of_family(module, kind) and "forward" not in module.__dict__
                if own and not is_fused(module) and (kind != "DecoderLayer" or match.is_layer(module)):
                    take_class(module, forward)
                    taken.append(module)
        yield
    finally:
        for module in taken:
            give_class_back(module)


def restore(module: nn.Module) -> bool:
    """Give a module its class back. Returns whether it was fused."""
    was_fused = give_class_back(module)
    if was_fused:
        graphs.forget(module)
    config: Any = getattr(module, "config", None)
    if getattr(config, "_attn_implementation", None) == attention.NAME:
        config._attn_implementation = "sdpa"
    return was_fused


def attach(report: ConversionReport, model: nn.Module) -> None:
    """Make a report the model's own."""
    report.attach(model, called_alone, padded_calls, unfused_calls)


def padded_calls(model: nn.Module) -> Counter[str]:
    """How many calls of the model have computed padding, by reason."""
    return sum((module.__dict__.get(PADDED, Counter()) for module in model.modules()), Counter())


def unfused_calls(model: nn.Module) -> Counter[str]:
    """How many calls with labels have computed all logits, by reason."""
    return sum((module.__dict__.get(UNFUSED, Counter()) for module in model.modules()), Counter())


def called_alone(model: nn.Module) -> list[str]:
    """The names of modules whose hooks keep a fused piece from being used."""
    names = []
    for name, module in model.named_modules():
        for child_name in _fused_children(module) if is_fused(module) else ():
            child = module._modules.get(child_name)
            inner = child.named_modules(prefix=f"{name}.{child_name}".lstrip(".")) if child is not None else ()
            # The modules of a layer with adapters count, too; attention and MLP report their own.
            is_leaf = child_name not in ("self_attn", "mlp")
            watched = [(own, each) for own, each in inner if is_hooked(each) and style_of(each) is None]
            names += [own for own, each in watched if each is child or is_leaf]
    return names


def _fused_children(module: nn.Module) -> tuple[str, ...]:
    """Children that this fused module does not call; attention and MLP are called where norms are apart from them."""
    if match.is_causal_lm(module) and HEAD not in module.__dict__:
        return ()  # its loss is not fused
    return NORMS if match.is_layer(module) and not joins_norms(module) else _FUSED_CHILDREN


def _fuse_final_norm(model: Any) -> None:
    """Compute the norm before the head in one kernel, whoever computes the head."""
    norm = getattr(model.model, "norm", None)
    if norm is not None and match.is_plain_norm(norm) and not is_fused(norm):
        take_class(norm, norm_forward)


def _note_head(report: ConversionReport, name: str, config: FP8TrainingConfig) -> None:
    for entry in report.entries:
        if entry.name == name:
            entry.precision, entry.reason, entry.op = FP8, "", "head"
            entry.formats = str(head_recipe(config))


def _use_fused_attention(model: Any) -> bool:
    """Have the model's attention run through `attention.py`, where all of it runs through sdpa now."""
    configs = attention.configs_of(model)
    if {getattr(config, "_attn_implementation", None) for config in configs} - {"sdpa", attention.NAME}:
        return False
    if model.config._attn_implementation != "sdpa":
        return False
    attention.register()
    for config in configs:
        config._attn_implementation = attention.NAME
    return True
