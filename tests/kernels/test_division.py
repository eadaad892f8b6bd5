"""The short division of `tiles.divide`, which the interpreter leaves out: fused multiply-adds, done here in float64."""

import numpy as np
import pytest

from octavo.numerics.formats import E4M3, E5M2


@pytest.mark.parametrize("exponent", [-100, 0, 100])
@pytest.mark.parametrize("divisor", [E4M3.max, E5M2.max])
def test_every_mantissa_is_divided_as_ieee_asks(divisor, exponent):
    amax = np.ldexp(np.arange(2**23, 2**24, dtype=np.float64), exponent - 23).astype(np.float32)
    inverse = np.float64(np.float32(1 / divisor))
    quotient = (amax * np.float32(inverse)).astype(np.float64)
    rest = amax - quotient * divisor  # exact: so is a fused multiply-add
    assert np.array_equal(rest, rest.astype(np.float32))
    actual = (quotient + rest * inverse).astype(np.float32)
    assert np.array_equal(actual, amax / np.float32(divisor))
