"""The FP8 autocast: inside it, matrix products of any spelling run in FP8, forward and backward.

    context = fp8_autocast(FP8TrainingConfig())        # create it once: it holds the scaling histories
    for batch in batches:
        with context:
            loss = model(batch)                        # `@`, matmul, bmm, einsum, linear, ...
        loss.backward()
        optimizer.step()                               # updates the scaling histories, too
    print(context.report)                              # every product, in FP8 or not, and why

Products are identified by their order: the n-th product after entering is the n-th of every step. Under `torch.compile`
they are identified when traced. The weight is the operand that is a Parameter or a view of one, on whichever side it
stands. Under `no_grad` the histories are not updated, so evaluation does not change them.

These products stay in high precision, with the reason in the report: those of weights that `config.skip` names, those
that contract fewer than 16 elements, those by a vector, and those in regions of `torch.autocast(enabled=False)` entered
inside the context. (`transformers` enters such a region only where torch's autocast is enabled; otherwise it cannot be
detected.)
"""

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from octavo.nn import checkpointing
from octavo.nn.attention import refuse_on_gpu
from octavo.nn.autocast_functions import FUNCTIONS
from octavo.nn.einsum import VECTOR
from octavo.nn.names import WeightNames, is_weight
from octavo.nn.product import fp8_product
from octavo.nn.report import FP8, Entry, Report
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.numerics.config import check_config
from octavo.numerics.scaling import new_states
from octavo.ops import ProductSpec
from octavo.support import announce_emulation, require_tensor_cores
from octavo.tracing import constant_when_traced, refuse_transforms

_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # FakeTensor: for `octavo plan`, which computes only shapes
# FP8 GEMMs contract multiples of 16 elements, and one BF16 instruction of the tensor cores contracts 16: a shorter
# product is padded and takes as long in FP8, plus the quantisation. Also, the fewer the terms of a sum, the less their
# rounding errors cancel: rotary positions are an outer product, in which neighbours would become equal.
SHORTEST_CONTRACTION = 16
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LIBRARY_FOLDERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class FP8Autocast(TorchFunctionMode):
    """The context that `fp8_autocast` returns. It can be reused and nested; the innermost context decides.

    Attributes: `scaling`, the manager with the histories and statistics of every product; `report`, the products that
    ran in FP8 and those that did not.
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
        self.has_model = model is not None
        self.scaling = FP8ScalingManager.from_config(self.config)
        self.report = Report("products under fp8_autocast", scaling=self.scaling, emulate=self.config.emulate)
        self._recipe = self.config.recipe
        self._names = WeightNames(self.config, model)
        self._state: Tensor | None = None  # [3 · max_products, SLOTS]: scaling state of a, b and g of each product
        self._ordinal = 0  # number of products since entering
        self._outer: list[int] = []
        self._autocasts: list[int] = []  # number of torch.autocast regions around each entry
        self._traced = 0  # products found while compiling; they take slots from the end
        self._entries: dict[int, Entry] = {}
        self._weights: dict[int, tuple[bool, bool]] = {}  # which of a and b is a weight
        self._high_precision: dict[tuple[str, ...], Entry] = {}
        self._key = str(next(_KEYS))  # a string: Dynamo may take a number for a variable
        _CONTEXTS[self._key] = self
        self._steps_seen = 0
        if enabled:
            self.scaling.follow_optimizers(model)

    @property
    def scaling_manager(self) -> FP8ScalingManager:
        """The same as `scaling`."""
        return self.scaling

    def __enter__(self) -> Self:
        self._outer.append(self._ordinal)
        self._autocasts.append(_autocast_depth())
        if len(self._outer) == 1:
            self._ordinal = 0
        if not torch.compiler.is_compiling():
            checkpointing.enter(self)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        outer = self._outer.pop()
        self._autocasts.pop()
        if self._outer:
            self._ordinal = max(outer, self._ordinal)
        if not torch.compiler.is_compiling():
            checkpointing.leave(self)
        super().__exit__(*exc)
        if exc[0] is None and self._entries and not torch.compiler.is_compiling():
            self._names.check()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is checkpoint:
            # `checkpoint` is a torch function only while compiling, and its body is traced with this mode off. Dynamo
            # does not allow the stack of modes to change for the first time in there, so change it once out here.
            with self:
                pass
            return func(self._within(args[0]), *args[1:], **kwargs)
        compute = FUNCTIONS.get(func)
        if compute is None:
            return func(*args, **kwargs)
        # Without this, an outer context would run in FP8 what an inner, disabled one leaves in high precision.
        with torch._C.DisableTorchFunction():
            if not torch.compiler.is_compiling():
                checkpointing.attach_to_recomputation()
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
        self,
        op: str,
        a: Tensor,
        b: Tensor,
        *,
        bias: Tensor | None = None,
        b_is_nk: bool = False,
        or_hp: bool = False,
    ) -> Tensor | str:
        """Return `a @ b + bias` in FP8 (`a @ bᵀ` if `b_is_nk`), or the reason why it cannot run in FP8.

        `or_hp`: in that case compute `a @ b` in high precision and return it.
        """
        reason = self._why_not(a, b, b_is_nk)
        if reason and or_hp:
            self._count_high_precision(op, reason, (a, b))
            return a @ b
        if reason:
            return reason
        a_is_weight, b_is_weight = is_weight(a), is_weight(b)
        if torch.compiler.is_compiling():
            slot = _trace_slot(self._key, op, str(a.device), a_is_weight, b_is_weight)
        else:
            slot = self._next_slot(op, a, b)
        assert self._state is not None
        state = (self._state[3 * slot], self._state[3 * slot + 1], self._state[3 * slot + 2])
        autocast = torch.is_autocast_enabled(a.device.type)
        product = ProductSpec(
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
        return fp8_product(a, b, bias, product, state)

    def _why_not(self, a: Tensor, b: Tensor, b_is_nk: bool) -> str:
        """Return why a product cannot run in FP8; empty if it can."""
        for x in (a, b):
            if type(x) not in _PLAIN:
                return f"operand of type {type(x).__name__}"
            if x.dtype not in _DTYPES:
                return f"operand of {x.dtype}"
            if x.layout != torch.strided:
                return f"operand with layout {x.layout}"
            if x.dim() < 2:
                return VECTOR
        k, n = b.mT.shape[-2:] if b_is_nk else b.shape[-2:]
        if a.shape[-1] != k or not _broadcast(a, b) or a.device != b.device or a.numel() == 0 or b.numel() == 0:
            return "shapes or devices do not fit, or an operand is empty"
        autocast = torch.is_autocast_enabled(a.device.type)
        if a.dtype != b.dtype and not autocast:
            return f"operands of {a.dtype} and {b.dtype}"
        if not autocast and self._autocasts and _autocast_depth() > self._autocasts[-1]:
            return "inside torch.autocast(enabled=False)"
        if n == 1 or (a.shape[-2] == 1 and is_weight(a)):
            return VECTOR
        if k < SHORTEST_CONTRACTION:
            return f"short: it contracts fewer than {SHORTEST_CONTRACTION} elements, where FP8 gains nothing"
        return "left alone: config.skip names its weight" if self._names.is_skipped(a, b) else ""

    def _next_slot(self, op: str, a: Tensor, b: Tensor) -> int:
        """Return the slot of the next product, and register it when it first comes."""
        if self.scaling.step_count != self._steps_seen:  # a step inside the context: products start over
            self._steps_seen, self._ordinal = self.scaling.step_count, 0
        start = self._ordinal
        self._prepare(a.device)
        self._ordinal += 1
        if start not in self._entries and len(self._entries) >= self.max_products and not torch.is_grad_enabled():
            return self.max_products  # the spare slot, whose scaling state is never registered
        if start not in self._entries:
            weight = self._names.name_of(a, b)
            shapes = f"{list(a.shape)} @ {list(b.shape)}"
            entry = Entry(
                f"{op}.{start}[{weight}]" if weight else f"{op}.{start}", op, FP8, shapes=shapes, where=_caller()
            )
            self._enter_product(start, entry, (is_weight(a), is_weight(b)))
        self._entries[start].calls += 1
        return start

    def position(self) -> int:
        """Return the number of products since entering."""
        return self._ordinal

    @contextmanager
    def at(self, position: int) -> Iterator[None]:
        """Enter this context as if `position` products had run in it before, for a recomputation."""
        before = self._ordinal
        with self:
            self._ordinal, self._steps_seen = position, self.scaling.step_count
            try:
                yield
            finally:
                self._ordinal = before

    def _prepare(self, device: torch.device) -> None:
        """Allocate the scaling state of all products on `device`, unless it is there."""
        if self._state is not None and self._state.device == device:
            return
        require_tensor_cores(device, self.config)
        announce_emulation(device, self.config.emulate)
        self._state = new_states(3 * (self.max_products + 1), device=device)
        for slot, entry in self._entries.items():
            self._register_state(slot, entry.name)

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
        self._register_state(slot, entry.name)

    def _register_state(self, slot: int, name: str) -> None:
        assert self._state is not None
        a, b = (self._recipe.w if is_weight else self._recipe.x for is_weight in self._weights[slot])
        for i, (operand, recipe) in enumerate((("a", a), ("b", b), ("g", self._recipe.g))):
            state = self._state[3 * slot + i]
            self.scaling.register(f"{name}.{operand}", recipe.format, recipe.margin, state)

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


# Dynamo calls a function with a constant result at trace time, but passes it only constants: a context by its key.
_CONTEXTS: WeakValueDictionary[str, FP8Autocast] = WeakValueDictionary()
_KEYS = itertools.count()


def all_contexts() -> list[FP8Autocast]:
    """Return the contexts that exist, in the order in which they were made."""
    return [context for _, context in sorted(_CONTEXTS.items(), key=lambda each: int(each[0]))]


@constant_when_traced
def _note_traced(key: str, op: str, reason: str) -> None:
    _CONTEXTS[key]._note(op, reason, "", "", "compiled")


@constant_when_traced
def _autocast_depth() -> int:
    """Return the number of `torch.autocast` regions around the caller, enabled or not."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@constant_when_traced
def _trace_slot(key: str, op: str, device: str, a_is_weight: bool, b_is_weight: bool) -> int:
    """Return a slot for a product that is traced, counted from the end."""
    checkpointing.refuse_compiled_inside()
    refuse_transforms()
    context = _CONTEXTS[key]
    context._prepare(torch.device(device))
    entry = Entry(f"{op}.compiled{context._traced}", op, FP8, where="compiled", calls=1)
    context._traced += 1
    slot = context.max_products - context._traced
    context._enter_product(slot, entry, (a_is_weight, b_is_weight))
    return slot


def _broadcast(a: Tensor, b: Tensor) -> bool:
    """Return True if the leading dimensions of two batches of matrices can be broadcast."""
    leading = zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False)
    return all(n == m or n == 1 or m == 1 for n, m in leading)


def _caller() -> str:
    """Return file and line of the first frame outside torch and this package."""
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
    """Return a context in which matrix products run in FP8.

    Create it once and enter it for every forward, in one thread: it holds the scaling histories. With `model`, the
    report names the weights, and only optimisers of that model update the histories. Without it, `config.skip` applies
    to the weights of the modules that call the products; `torch.compile` needs `model`, or an empty `skip`.
    `enabled=False` makes a region of high precision inside another context.
    """
    config = check_config(config)
    if enabled:
        require_tensor_cores(None, config)
    return FP8Autocast(config, enabled=enabled, model=model, max_products=max_products)


get_fp8_autocast_context = fp8_autocast
