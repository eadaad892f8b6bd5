"""Where FP8 pays for a frozen base, by its shapes."""

import pytest

from octavo.nn import cost_model
from octavo.tools.shapes import make_case


@pytest.mark.parametrize(
    ("preset", "pays"),
    [("135m", False), ("360m", False), ("qwen3-0.6b", True), ("1b", True), ("8b", True), ("tiny", False)],
)
def test_products_by_frozen_weights(preset, pays):
    case = make_case(preset=preset, config=None, layers=None, tokens=None, seq=None, seed=0, device="cpu", force=True)
    shapes = [(linear.k, 1.0, linear.n) for linear in case.linears if linear.name != "head"]
    assert (not cost_model.why_not_frozen(shapes)) is pays


def test_inputs_that_are_quantised_once_for_several():
    """q, k and v one by one, each with its share of their common input, are as one."""
    one, several = [(1024, 1.0, 3072)], [(1024, 2 / 3, 2048), (1024, 1 / 6, 512), (1024, 1 / 6, 512)]
    assert cost_model.why_not_frozen(one) == cost_model.why_not_frozen(several) == ""
    assert "width of 640" in cost_model.why_not_frozen([(1024, 1.0, 1706)])
