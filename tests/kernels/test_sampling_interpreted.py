"""The kernels that draw tokens, in Triton's interpreter, against the specification."""

import numpy
import pytest
import torch
from sampling_cases import assert_same_choice, new_logits

from octavo.kernels import sampling as kernel
from octavo.kernels.tuning import HOPPER, SamplingTile
from octavo.numerics import sampling as spec

ONE = torch.ones(())
# Less than a counter's four, a part of a tile, several tiles and an edge.
SHAPES = [(1, 1), (3, 7), (2, 513), (2, 2048), (3, 5001)]


def seed_of(value):
    return torch.tensor([value])


@pytest.fixture(params=[1, 64], ids=["one part", "many parts"])
def parts(request, monkeypatch):
    """Programs of a multiprocessor, of which the interpreter has two: parts of a row."""
    tuning = HOPPER._replace(sampling=SamplingTile(256, 4, request.param))
    monkeypatch.setattr(kernel, "tuning_for", lambda _: tuning)
    kernel._LAUNCHES.clear()
    yield request.param
    kernel._LAUNCHES.clear()


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("temperature", [1.0, 0.3, 4.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sampled(shape, temperature):
    logits = new_logits(*shape)
    given = (logits, ONE * temperature, seed_of(-(2**40) + 3), False)
    assert_same_choice(kernel.sample(*given), given)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy(shape):
    given = (new_logits(*shape), ONE * 7, seed_of(0), True)
    assert_same_choice(kernel.sample(*given), given)


@pytest.mark.usefixtures("parts")
def test_the_first_of_equal_logits():
    logits = torch.zeros(3, 5000)
    logits[1, [4999, 700, 2500]] = 1.0
    logits[2, [4097, 4096]] = 2.0
    token, logprob = kernel.sample(logits, ONE, seed_of(0), True)
    assert token.tolist() == [0, 700, 4096]
    assert torch.allclose(logprob, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("greedy", [False, True])
@numpy.errstate(all="ignore")
def test_logits_that_are_not_finite(greedy):
    logits = new_logits(6, 3000)
    logits[0, 2900] = torch.nan
    logits[1, 5] = torch.inf
    logits[2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 2222] = 3.0
    logits[4, ::2] = -torch.inf
    given = (logits, ONE, seed_of(5), greedy)
    token, logprob = kernel.sample(*given)
    assert logprob[:3].isnan().all() and ((token >= 0) & (token < 3000)).all()
    assert token[3] == 2222 and logprob[3] == 0 and token[4] % 2 == 1
    rest = (logits[3:], ONE, seed_of(5), greedy)
    if greedy:
        assert_same_choice((token[3:], logprob[3:]), rest)


@pytest.mark.parametrize("scale", [1e-30, 1e4, 1e30])
@numpy.errstate(all="ignore")
def test_logits_of_any_size(scale):
    given = (new_logits(3, 2100) * scale, ONE, seed_of(9), False)
    token, logprob = kernel.sample(*given)
    assert logprob.isfinite().all()
    if scale > 1:
        assert torch.equal(token, given[0].argmax(-1)) and not logprob.any()
    else:
        assert_same_choice((token, logprob), given)


def test_rows_of_wider_logits():
    wide = new_logits(4, 3000)
    given = (wide[:, :2500], ONE, seed_of(3), False)
    assert kernel.can_sample(given[0]) and not kernel.can_sample(wide.t())
    assert_same_choice(kernel.sample(*given), given)


def test_noise_is_that_of_the_specification():
    """With equal logits it alone decides: the smallest of 1,500 elements, in 9 rows."""
    given = (torch.zeros(9, 1500), ONE, seed_of(2**62 + 17), False)
    token, _ = kernel.sample(*given)
    assert torch.equal(token, spec.exponential((9, 1500), given[2]).argmin(dim=-1))


def test_nearly_equal_logits():
    """A multiplication would make them equal: the larger one is the token all the same."""
    logits = torch.zeros(40, 8)
    low = 1.5 + 2.0**-23 * torch.arange(40)  # times log₂e above 2, where FP32 has half as many numbers
    logits[:, 2], logits[:, 5] = low, low.nextafter(torch.tensor(2.0))
    token, _ = kernel.sample(logits, ONE, seed_of(0), True)
    assert (token == 5).all()
