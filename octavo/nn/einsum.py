"""`einsum` as matrix products.

Two operands contract as one batched product: every index is a batch index (in both and in the result), contracted (in
both, not in the result), or free (in one and in the result). An index in one operand only and not in the result is
summed first. More operands contract from left to right, as `torch.einsum` does without an optimiser.
"""

import math
from collections.abc import Callable
from functools import partial

from torch import Tensor

Multiply = Callable[..., "Tensor | str"]
_ELLIPSIS_INDICES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
VECTOR = "a matrix-vector product gains nothing from FP8"
_MISFIT = "einsum whose equation does not fit its operands"


def einsum(multiply: Multiply, equation: str, operands: list[Tensor]) -> Tensor | str:
    """Return the result, or the reason why it is not a chain of matrix products.

    `multiply(a, b)` is `a @ b`. If a later product of a chain cannot run in FP8, it runs in high precision and the
    earlier ones stay.
    """
    if len(operands) < 2:
        return "einsum of one operand"
    parsed = _parse(equation, operands)
    if isinstance(parsed, str):
        return parsed
    inputs, output = parsed
    left, left_indices = operands[0], inputs[0]
    for position, remaining in enumerate(_intermediate(inputs, output), start=1):
        contracted = _contract(
            partial(multiply, or_hp=position > 1), left, left_indices, operands[position], inputs[position], remaining
        )
        if isinstance(contracted, str):
            return contracted
        left, left_indices = contracted, remaining
    return left.permute([left_indices.index(i) for i in output])


def _intermediate(inputs: list[str], output: str) -> list[str]:
    """Return the indices of the intermediate result after each operand but the first."""
    results, left = [], inputs[0]
    for position in range(1, len(inputs)):
        later = set(output).union(*inputs[position + 1 :])
        left = "".join(i for i in dict.fromkeys(left + inputs[position]) if i in later)
        results.append(left)
    return results


def _parse(equation: str, operands: list[Tensor]) -> tuple[list[str], str] | str:
    """Return the indices of each operand and of the result, with the ellipsis written out; or why that fails."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    inputs = left.split(",")
    if any(i in _ELLIPSIS_INDICES for i in equation):
        return "einsum with upper-case indices, or in sublist form"
    if len(inputs) != len(operands) or not all(_is_term(term) for term in [*inputs, right]):
        return _MISFIT
    rest = [x.dim() - len(indices.replace("...", "")) for x, indices in zip(operands, inputs, strict=True)]
    longest = max([0] + [n for n, indices in zip(rest, inputs, strict=True) if "..." in indices])
    spelled = []
    for indices, n in zip(inputs, rest, strict=True):
        if n < 0 or (n > 0 and "..." not in indices) or longest > len(_ELLIPSIS_INDICES):
            return _MISFIT
        spelled.append(indices.replace("...", _ELLIPSIS_INDICES[longest - n : longest]))
    if any(len(set(indices)) < len(indices) for indices in spelled):
        return "einsum with a repeated index (a diagonal)"
    joined = "".join(spelled)
    if arrow:
        output = right.replace("...", _ELLIPSIS_INDICES[:longest])
    else:
        once = sorted(i for i in set(joined) if joined.count(i) == 1 and i not in _ELLIPSIS_INDICES)
        output = _ELLIPSIS_INDICES[:longest] + "".join(once)
    if len(set(output)) < len(output) or not set(output) <= set(joined):
        return _MISFIT
    return _why_no_products(spelled, output, operands) or (spelled, output)


def _is_term(term: str) -> bool:
    letters = term.replace("...", "", 1)
    return letters == "" or (letters.isascii() and letters.isalpha())


def _why_no_products(inputs: list[str], output: str, operands: list[Tensor]) -> str:
    """Return why the operands are no chain of products, before anything is computed; empty if they are one."""
    sizes: dict[str, int] = {}
    for indices, x in zip(inputs, operands, strict=True):
        for i, size in zip(indices, x.shape, strict=True):
            if sizes.setdefault(i, size) != size:
                return "einsum that broadcasts an index of size 1"
    left = inputs[0]
    for indices, remaining in zip(inputs[1:], _intermediate(inputs, output), strict=True):
        if not set(left) & set(indices) - set(remaining):
            return "einsum that contracts nothing"
        if not set(left) & set(remaining) - set(indices) or not set(indices) & set(remaining) - set(left):
            return VECTOR
        left = remaining
    return ""


def _contract(multiply: Multiply, a: Tensor, a_indices: str, b: Tensor, b_indices: str, remaining: str) -> Tensor | str:
    """Contract two operands to the indices in `remaining`, in that order."""
    a, a_indices = _sum_out(a, a_indices, set(b_indices) | set(remaining))
    b, b_indices = _sum_out(b, b_indices, set(a_indices) | set(remaining))
    batch = [i for i in a_indices if i in b_indices and i in remaining]
    contracted = [i for i in a_indices if i in b_indices and i not in remaining]
    rows = [i for i in a_indices if i not in b_indices]
    columns = [i for i in b_indices if i not in a_indices]
    sizes = dict(zip(a_indices + b_indices, [*a.shape, *b.shape], strict=True))
    a_3d = _arrange(a, a_indices, [batch, rows, contracted], sizes)
    b_3d = _arrange(b, b_indices, [batch, contracted, columns], sizes)
    y = multiply(a_3d, b_3d) if batch else multiply(a_3d[0], b_3d[0])
    if isinstance(y, str):
        return y
    indices = [*batch, *rows, *columns]
    return y.reshape([sizes[i] for i in indices]).permute([indices.index(i) for i in remaining])


def _sum_out(x: Tensor, indices: str, wanted: set[str]) -> tuple[Tensor, str]:
    lonely = [d for d, i in enumerate(indices) if i not in wanted]
    return (x.sum(lonely), "".join(i for i in indices if i in wanted)) if lonely else (x, indices)


def _arrange(x: Tensor, indices: str, groups: list[list[str]], sizes: dict[str, int]) -> Tensor:
    """Permute, then merge each group of indices into one dimension."""
    order = [indices.index(i) for group in groups for i in group]
    return x.permute(order).reshape([math.prod([sizes[i] for i in group]) for group in groups])
