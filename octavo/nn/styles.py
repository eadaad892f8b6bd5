"""How a linear takes part in tensor parallelism: what its engine does before and after it is called.

`parallelize_module` hangs two hooks on a linear, and transformers' `tp_plan` puts a function in the place of its
forward. Either brings the input into place, calls the linear, and brings the output into place. A fused piece reads
weights without calling the linears that hold them, so it has to do the same, once for all of them:

    torch           functools.partial(ColwiseParallel._prepare_input_fn, input_layouts, desired) in the hook's closure
    transformers    a ColwiseParallel or a RowwiseParallel of its own, in the closure of `tp_forward`

Neither is a public name: `tests/dist/test_parallel.py` holds them to what is read here. A hook of any other kind is
not known here, and the linear is then called as itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.placement_types import Placement

COLUMNS, ROWS = "columns", "rows"
_KINDS: tuple[tuple[str, Any], ...] = ((COLUMNS, ColwiseParallel), (ROWS, RowwiseParallel))
_TRANSFORMERS = "transformers.distributed.tensor_parallel"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Style:
    """One linear of tensor parallelism: `by` columns (outputs) or rows (inputs) of its weight, on a mesh."""

    by: str
    mesh: DeviceMesh
    input: Placement
    output: Placement
    local_output: bool


class ShardedInput:
    """The hook of `fp8_sequence_gather`: x stays sharded by tokens, for the linear to gather it in FP8."""

    def __init__(self, style: Style) -> None:
        self.style = style

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = inputs
        return place(x, self.style.mesh, self.style.input), *rest


def style_of(module: Any) -> Style | None:
    """The style of a linear; None if it has none, or if somebody else watches or changes it, too."""
    own = module.__dict__
    if "forward" in own:
        return None if any(own[kind] for kind in _HOOKS) else _style_of_forward(own["forward"])
    before, after = list(own["_forward_pre_hooks"].values()), list(own["_forward_hooks"].values())
    if len(before) != 1 or len(after) != 1 or own["_backward_hooks"] or own["_backward_pre_hooks"]:
        return None
    taken, given = _variables(after[0]), before[0]
    output_fn, mesh = taken.get("output_fn"), taken.get("device_mesh")
    for by, kind in _KINDS:
        if getattr(output_fn, "func", None) is kind._prepare_output_fn and mesh is not None:
            place_in = _input_of(given, kind)
            if place_in is not None:
                return Style(by, mesh, place_in, output_fn.args[0][0], output_fn.args[1])
    return None


def is_sequence_parallel(module: nn.Module) -> bool:
    """Whether a module, such as a norm, computes a part of the tokens (torch's `SequenceParallel`)."""
    hooks = module.__dict__["_forward_pre_hooks"].values()
    return any(
        getattr(_variables(hook).get("input_fn"), "func", None) is SequenceParallel._prepare_input_fn for hook in hooks
    )


def prepared_inputs(module: nn.Module) -> list[tuple[int, PrepareModuleInput, DeviceMesh]]:
    """The hooks of torch's `PrepareModuleInput` on a module: their keys, styles and meshes."""
    found = []
    for key, hook in module.__dict__["_forward_pre_hooks"].items():
        variables = _variables(hook)
        style, mesh = variables.get("self"), variables.get("device_mesh")
        if type(style) is PrepareModuleInput and mesh is not None:
            found.append((key, style, mesh))
    return found


def move_forward(module: nn.Module, change: Callable[[], None]) -> None:
    """Change the class of a linear. Where transformers has replaced its forward, that calls the new class's then."""
    forward = module.__dict__.get("forward")
    parallel = forward is not None and _style_of_forward(forward) is not None
    if parallel:
        del module.__dict__["forward"]
    change()
    if parallel:
        variables = _variables(forward)
        variables["self"].install_forward(module, variables["mesh"])


def place(x: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """x as a DTensor; one that is none is this rank's part of it."""
    return x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, (placement,), run_check=False)


def enter(x: Tensor, style: Style) -> Tensor:
    """All of the input of linears that are parallel by columns. The sum of its gradients over ranks goes back."""
    whole = place(x, style.mesh, style.input)
    if whole.placements != (Replicate(),):
        whole = whole.redistribute(placements=(Replicate(),))
    return whole.to_local(grad_placements=(Partial(),))


def leave(y: Tensor, style: Style) -> Tensor:
    """The output of a linear from this rank's part of it: of its features, or of the sums that are its elements."""
    part: Placement = Shard(y.dim() - 1) if style.by == COLUMNS else Partial()
    whole = DTensor.from_local(y, style.mesh, (part,), run_check=False)
    output = style.output
    if isinstance(output, Shard):
        output = Shard(output.dim % y.dim())
    if whole.placements != (output,):
        whole = whole.redistribute(placements=(output,))
    return whole.to_local() if style.local_output else whole


def _style_of_forward(forward: Any) -> Style | None:
    variables = _variables(forward)
    style, mesh = variables.get("self"), variables.get("mesh")
    if getattr(forward, "__module__", "") != _TRANSFORMERS or mesh is None:
        return None
    for by, kind in _KINDS:
        if type(style).__module__ == _TRANSFORMERS and type(style).__name__ == kind.__name__:
            return Style(by, mesh, style.input_layouts, style.output_layouts, style.use_local_output)
    return None


def _input_of(hook: Any, kind: Any) -> Placement | None:
    if isinstance(hook, ShardedInput):
        return hook.style.input
    prepare = _variables(hook).get("input_fn")
    return prepare.args[0][0] if getattr(prepare, "func", None) is kind._prepare_input_fn else None


def _variables(function: Any) -> Any:
    """The variables that a function has taken from where it was made, by name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    return {} if code is None else {n: c.cell_contents for n, c in zip(code.co_freevars, cells, strict=True)}
