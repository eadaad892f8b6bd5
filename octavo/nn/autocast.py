"""The FP8 autocast: inside it, matrix products of any spelling run in FP8, forward and backward.

    context = fp8_autocast(FP8TrainingConfig())        # keep it: it holds the scaling histories
    for batch in batches:
        with context:
            loss = model(batch)                        # `@`, matmul, bmm, einsum, linear, ...
        loss.backward()
        optimizer.step()                               # histories roll here, by themselves
    print(context.report)                              # every product, in FP8 or not, and why

Products are told apart by their order: the n-th product after entering is the n-th of every step. Under
`torch.compile` they are told apart when traced. Which operand is the weight does not depend on its place: it is the
one that is a Parameter or a view of one. Under `no_grad` nothing is learned: evaluation leaves the histories alone.
"""

import fnmatch
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from octavo.nn.attention import refuse_on_gpu
from octavo.nn.autocast_functions import FUNCTIONS
from octavo.nn.checkpointing import attach_to_recomputation
from octavo.nn.product import fp8_product
from octavo.nn.report import FP8, Entry, Report
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.config import check_config
from octavo.numerics.scaling import new_rows
from octavo.ops import Product
from octavo.support import announce_emulation, require_tensor_cores

_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # fake: of `octavo plan`, which computes shapes alone
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class FP8Autocast(TorchFunctionMode):
    """The context that `fp8_autocast` returns. Reusable, nestable; the innermost one decides.

    Attributes: `scaling`, the manager with every product's histories and statistics; `report`, what ran in FP8.
    """

    def __init__(
        self,
        config: FP8TrainingConfig | str | None = None,
        *,
        enabled: bool = True,
        model: nn.Module | None = None,
        max_products: int = 2048,
    ) -> None:
        super().__init__()
        self.config = check_config(config)
        self.enabled = enabled
        self.max_products = max_products
        self.scaling = FP8ScalingManager.from_config(self.config)
        self.report = Report("products under fp8_autocast", scaling=self.scaling, emulate=self.config.emulate)
        self._recipe = self.config.recipe
        self._parameters = list(model.named_parameters()) if model is not None else []
        self._skipped = [p for name, p in self._parameters if is_skipped(name, self.config)]
        self._rows: Tensor | None = None  # [3 · max_products, ROW]: a, b and g of each product
        self._ordinal = 0  # of the next product since entering
        self._outer: list[int] = []
        self._traced = 0  # products found while compiling; they take slots from the end
        self._entries: dict[int, Entry] = {}
        self._weights: dict[int, tuple[bool, bool]] = {}  # which of a and b is a weight
        self._high_precision: dict[tuple[str, ...], Entry] = {}
        self._key = next(_KEYS)
        _CONTEXTS[self._key] = self
        self._steps_seen = 0
        if enabled:
            self.scaling.follow_optimizers(model)

    @property
    def scaling_manager(self) -> FP8ScalingManager:
        """Another name for `scaling`."""
        return self.scaling

    def __enter__(self) -> Self:
        self._outer.append(self._ordinal)
        if len(self._outer) == 1:
            self._ordinal = 0
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        outer = self._outer.pop()
        if self._outer:
            self._ordinal = max(outer, self._ordinal)
        super().__exit__(*exc)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is checkpoint:
            # Only while compiling is `checkpoint` a torch function, and its body traced with this mode switched off.
            # Dynamo forbids to change the stack of modes for the first time in there: so once out here.
            with self:
                pass
            return func(self._within(args[0]), *args[1:], **kwargs)
        compute = FUNCTIONS.get(func)
        if compute is None:
            return func(*args, **kwargs)
        # Without this, a context further out would take over what an inner, disabled one leaves alone.
        with torch._C.DisableTorchFunction():
            if not self.enabled:
                return func(*args, **kwargs)
            if func is F.scaled_dot_product_attention and not self.config.fp8_dpa:
                result: Tensor | str = "fp8_dpa is off"
            else:
                if func is F.scaled_dot_product_attention and not self.config.emulate:
                    refuse_on_gpu(args[0] if args else kwargs["query"])
                result = compute(self.multiply, *args, **kwargs)
            if not isinstance(result, str):
                return result
            self._count_high_precision(func.__name__, result, args)
            return func(*args, **kwargs)

    def _within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return inner

    def multiply(
        self, op: str, a: Tensor, b: Tensor, *, bias: Tensor | None = None, b_is_nk: bool = False
    ) -> Tensor | str:
        """`a @ b + bias` in FP8 (`a @ bᵀ` if `b_is_nk`), or the reason why not."""
        reason = self._why_not(a, b, b_is_nk)
        if reason:
            return reason
        a_is_weight, b_is_weight = is_weight(a), is_weight(b)
        if torch.compiler.is_compiling():
            slot = _trace_slot(self._key, op, str(a.device), a_is_weight, b_is_weight)
        else:
            slot = self._next_slot(op, a, b)
        assert self._rows is not None
        rows = (self._rows[3 * slot], self._rows[3 * slot + 1], self._rows[3 * slot + 2])
        autocast = torch.is_autocast_enabled(a.device.type)
        product = Product(
            a=self._recipe.w if a_is_weight else self._recipe.x,
            b=self._recipe.w if b_is_weight else self._recipe.x,
            g=self._recipe.g,
            out_dtype=torch.get_autocast_dtype(a.device.type) if autocast else a.dtype,
            b_is_nk=b_is_nk,
            a_is_weight=a_is_weight,
            b_is_weight=b_is_weight,
            record=torch.is_grad_enabled(),
            emulate=self.config.emulate is True,
            fast_forward=self.config.fast_accumulation != "none",
            fast_backward=self.config.fast_accumulation == "all",
        )
        return fp8_product(a, b, bias, product, rows)

    def _why_not(self, a: Tensor, b: Tensor, b_is_nk: bool) -> str:
        """The reason why a product cannot run in FP8; empty if it can."""
        for x in (a, b):
            if type(x) not in _PLAIN:
                return f"operand of type {type(x).__name__}"
            if x.dtype not in _DTYPES:
                return f"operand of {x.dtype}"
            if x.layout != torch.strided:
                return f"operand with layout {x.layout}"
            if x.dim() < 2:
                return "a matrix-vector product gains nothing from FP8"
        k = b.shape[-1] if b_is_nk else b.shape[-2]
        if a.shape[-1] != k or a.device != b.device or a.numel() == 0 or b.numel() == 0:
            return "shapes or devices do not fit, or an operand is empty"
        if a.dtype != b.dtype and not torch.is_autocast_enabled(a.device.type):
            return f"operands of {a.dtype} and {b.dtype}"
        for parameter in self._skipped:
            if is_same(a, parameter) or is_same(b, parameter):
                return "left alone: config.skip names its weight"
        return ""

    def _next_slot(self, op: str, a: Tensor, b: Tensor) -> int:
        """The slot of the next product in order."""
        if self.scaling.step_count != self._steps_seen:  # a step inside the context: products start over
            self._steps_seen, self._ordinal = self.scaling.step_count, 0
        start = self._ordinal
        attach_to_recomputation(self, lambda function: self._recompute(function, start))
        self._prepare(a.device)
        self._ordinal += 1
        if start not in self._entries and len(self._entries) >= self.max_products and not torch.is_grad_enabled():
            return self.max_products  # the spare slot: nothing is learned from it
        if start not in self._entries:
            weight = next((f"[{name}]" for name, p in self._parameters if is_same(a, p) or is_same(b, p)), "")
            shapes = f"{list(a.shape)} @ {list(b.shape)}"
            entry = Entry(f"{op}.{start}{weight}", op, FP8, shapes=shapes, where=_caller())
            self._enter_product(start, entry, (is_weight(a), is_weight(b)))
        self._entries[start].calls += 1
        return start

    def _recompute(self, function: Callable[..., Any], start: int) -> Callable[..., Any]:
        """`function`, run in this context as if `start` products had gone before it."""

        def recompute(*args: Any, **kwargs: Any) -> Any:
            before = self._ordinal
            with self:
                self._ordinal, self._steps_seen = start, self.scaling.step_count
                try:
                    return function(*args, **kwargs)
                finally:
                    self._ordinal = before

        return recompute

    def _prepare(self, device: torch.device) -> None:
        """Have rows for all products on `device`."""
        if self._rows is not None and self._rows.device == device:
            return
        require_tensor_cores(device, self.config)
        announce_emulation(device, self.config.emulate)
        self._rows = new_rows(3 * (self.max_products + 1), device=device)
        for slot, entry in self._entries.items():
            self._register_rows(slot, entry.name)

    def _enter_product(self, slot: int, entry: Entry, weights: tuple[bool, bool]) -> None:
        if len(self._entries) >= self.max_products:
            raise RuntimeError(
                f"max_products={self.max_products}: more products since the context was entered; "
                "enter it once for each forward, or pass fp8_autocast a larger max_products"
            )
        entry.formats = str(self._recipe)
        self._entries[slot] = entry
        self._weights[slot] = weights
        self.report.entries.append(entry)
        self._register_rows(slot, entry.name)

    def _register_rows(self, slot: int, name: str) -> None:
        assert self._rows is not None
        a, b = (self._recipe.w if is_weight else self._recipe.x for is_weight in self._weights[slot])
        for i, (operand, recipe) in enumerate((("a", a), ("b", b), ("g", self._recipe.g))):
            row = self._rows[3 * slot + i]
            self.scaling.register(f"{name}.{operand}", recipe.format, recipe.margin, row)

    def _count_high_precision(self, op: str, reason: str, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            _note_traced(self._key, op, reason)
            return
        shapes = " @ ".join(str(list(x.shape)) for x in args if isinstance(x, Tensor))
        dtype = next((str(x.dtype).removeprefix("torch.") for x in args if isinstance(x, Tensor)), "")
        self._note(op, reason, dtype, shapes, _caller())

    def _note(self, op: str, reason: str, dtype: str, shapes: str, where: str) -> None:
        key = (op, reason, where)
        if key not in self._high_precision:
            self._high_precision[key] = Entry(op, op, dtype or "high", reason, shapes, where=where)
            self.report.entries.append(self._high_precision[key])
        self._high_precision[key].calls += 1


# Dynamo calls a function with a constant result at trace time, but passes it constants only: the context by its key.
_CONTEXTS: WeakValueDictionary[int, FP8Autocast] = WeakValueDictionary()
_KEYS = itertools.count()


def _constant_when_traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """All that `torch.compiler.assume_constant_result` does, but that imports Dynamo: 2 of 5 s of `import octavo`."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_constant_when_traced
def _note_traced(key: int, op: str, reason: str) -> None:
    _CONTEXTS[key]._note(op, reason, "", "", "compiled")


@_constant_when_traced
def _trace_slot(key: int, op: str, device: str, a_is_weight: bool, b_is_weight: bool) -> int:
    """While compiling: a slot of its own for every product traced, counted from the end."""
    context = _CONTEXTS[key]
    context._prepare(torch.device(device))
    entry = Entry(f"{op}.compiled{context._traced}", op, FP8, where="compiled", calls=1)
    context._traced += 1
    slot = context.max_products - context._traced
    context._enter_product(slot, entry, (a_is_weight, b_is_weight))
    return slot


def is_weight(x: Tensor) -> bool:
    """A Parameter or a view of one."""
    return isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter)


def is_same(x: Tensor, parameter: Tensor) -> bool:
    """Whether `x` is this Parameter or a view of it."""
    return x is parameter or x._base is parameter


def is_skipped(name: str, config: FP8TrainingConfig) -> bool:
    """Whether `config.skip` names this layer or parameter: its name, a part of its dotted name, or by a pattern."""
    return any(matches(name, pattern) for pattern in config.skip)


def matches(name: str, pattern: str) -> bool:
    return pattern in name.split(".") or fnmatch.fnmatch(name, pattern)


def _caller() -> str:
    """File and line of the first frame outside torch and this package."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY_FOLDERS):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


def fp8_autocast(
    config: FP8TrainingConfig | str | None = None,
    *,
    enabled: bool = True,
    model: nn.Module | None = None,
    max_products: int = 2048,
) -> FP8Autocast:
    """A context in which matrix products run in FP8.

    Make it once and enter it for every forward, in one thread: it holds the scaling histories. With `model`, the report
    names the weights, `config.skip` applies to them, and only optimisers of that model roll the histories.
    `enabled=False` makes a region of high precision inside another context.
    """
    config = check_config(config)
    if enabled:
        require_tensor_cores(None, config)
    return FP8Autocast(config, enabled=enabled, model=model, max_products=max_products)


get_fp8_autocast_context = fp8_autocast
