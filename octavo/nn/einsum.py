"""`einsum` as matrix products.

Two operands contract as one batched product: every index is a batch index (in both and in the result), contracted (in
both, not in the result), or free (in one and in the result). An index in one operand only and not in the result is
summed first. More operands contract from left to right, as `torch.einsum` does without an optimiser.
"""

import math
from collections.abc import Callable

from torch import Tensor

Multiply = Callable[[Tensor, Tensor], "Tensor | str"]
_ELLIPSIS_INDICES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def einsum(multiply: Multiply, equation: str, operands: list[Tensor]) -> Tensor | str:
    """The result, or the reason why it is not a chain of matrix products. `multiply(a, b)` is `a @ b`."""
    if len(operands) < 2:
        return "einsum of one operand"
    parsed = _parse(equation, operands)
    if isinstance(parsed, str):
        return parsed
    inputs, output = parsed
    left, left_indices = operands[0], inputs[0]
    for position in range(1, len(operands)):
        later = set(output).union(*inputs[position + 1 :])
        keep = "".join(i for i in dict.fromkeys(left_indices + inputs[position]) if i in later)
        contracted = _contract(multiply, left, left_indices, operands[position], inputs[position], keep)
        if isinstance(contracted, str):
            return contracted
        left, left_indices = contracted, keep
    return left.permute([left_indices.index(i) for i in output])


def _parse(equation: str, operands: list[Tensor]) -> tuple[list[str], str] | str:
    """Indices of each operand and of the result, with the ellipsis written out; or why this cannot be done."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if len(inputs) != len(operands):
        return "einsum whose equation does not fit its operands"
    if any(i in _ELLIPSIS_INDICES for i in equation):
        return "einsum with upper-case indices, or in sublist form"
    rest = [x.dim() - len(indices.replace("...", "")) for x, indices in zip(operands, inputs, strict=True)]
    longest = max([0] + [n for n, indices in zip(rest, inputs, strict=True) if "..." in indices])
    spelled = []
    for indices, n in zip(inputs, rest, strict=True):
        if n < 0 or (n > 0 and "..." not in indices):
            return "einsum whose equation does not fit its operands"
        spelled.append(indices.replace("...", _ELLIPSIS_INDICES[longest - n : longest]))
    if any(len(set(indices)) < len(indices) for indices in spelled):
        return "einsum with a repeated index (a diagonal)"
    if arrow:
        output = right.replace("...", _ELLIPSIS_INDICES[:longest])
    else:
        joined = "".join(spelled)
        once = sorted(i for i in set(joined) if joined.count(i) == 1 and i not in _ELLIPSIS_INDICES)
        output = _ELLIPSIS_INDICES[:longest] + "".join(once)
    return spelled, output


def _contract(multiply: Multiply, a: Tensor, a_indices: str, b: Tensor, b_indices: str, keep: str) -> Tensor | str:
    """Contract two operands to the indices in `keep`, in that order."""
    a, a_indices = _sum_out(a, a_indices, set(b_indices) | set(keep))
    b, b_indices = _sum_out(b, b_indices, set(a_indices) | set(keep))
    batch = [i for i in a_indices if i in b_indices and i in keep]
    contracted = [i for i in a_indices if i in b_indices and i not in keep]
    rows = [i for i in a_indices if i not in b_indices]
    columns = [i for i in b_indices if i not in a_indices]
    if not contracted:
        return "einsum that contracts nothing"
    sizes = dict(zip(a_indices, a.shape, strict=True))
    for i, size in zip(b_indices, b.shape, strict=True):
        if sizes.setdefault(i, size) != size:
            return "einsum that broadcasts an index of size 1"
    a_3d = _arrange(a, a_indices, [batch, rows, contracted], sizes)
    b_3d = _arrange(b, b_indices, [batch, contracted, columns], sizes)
    y = multiply(a_3d, b_3d) if batch else multiply(a_3d[0], b_3d[0])
    if isinstance(y, str):
        return y
    found = [*batch, *rows, *columns]
    return y.reshape([sizes[i] for i in found]).permute([found.index(i) for i in keep])


def _sum_out(x: Tensor, indices: str, wanted: set[str]) -> tuple[Tensor, str]:
    lonely = [d for d, i in enumerate(indices) if i not in wanted]
    return (x.sum(lonely), "".join(i for i in indices if i in wanted)) if lonely else (x, indices)


def _arrange(x: Tensor, indices: str, groups: list[list[str]], sizes: dict[str, int]) -> Tensor:
    """Permute, then merge each group of indices into one dimension."""
    order = [indices.index(i) for group in groups for i in group]
    return x.permute(order).reshape([math.prod([sizes[i] for i in group]) for group in groups])
