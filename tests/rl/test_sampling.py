"""Tokens chosen from logits, against probabilities computed by hand."""

import pytest
import torch

from octavo.rl import Sampling
from octavo.rl.sampling import choose

ONE = torch.ones(())


def drawn(logits, sampling, times=20_000):
    generator = torch.Generator().manual_seed(0)
    temperature = torch.tensor(sampling.temperature or 1.0)
    token, logprob = choose(logits.expand(times, -1), sampling, temperature, generator)
    return torch.bincount(token, minlength=logits.shape[-1]) / times, token, logprob


def test_shares_are_those_of_softmax():
    logits = torch.tensor([2.0, 0.0, 1.0, -torch.inf, -3.0])
    for temperature in (0.5, 1.0, 2.0):
        shares, token, logprob = drawn(logits, Sampling(temperature=temperature))
        expected = (logits / temperature).softmax(-1)
        # Five standard deviations of a share p of 20,000 draws.
        assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / 20_000).sqrt()).all()
        assert torch.allclose(logprob, expected.log()[token], atol=1e-6)


def test_greedy():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]])
    token, logprob = choose(logits, Sampling(temperature=0), ONE * 7, torch.Generator())
    assert token.tolist() == [1, 0]
    assert torch.allclose(logprob, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])  # of temperature 1


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 1}, [0]),
        ({"top_k": 2}, [0, 1]),
        ({"top_k": 99}, [0, 1, 2, 3]),
        ({"top_p": 0.5}, [0]),
        ({"top_p": 0.51}, [0, 1]),
        ({"top_p": 0.81}, [0, 1, 2]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"min_p": 0.5}, [0, 1]),
        ({"min_p": 1.0}, [0]),
        ({"min_p": 0.0}, [0, 1, 2, 3]),
        ({"top_k": 3, "min_p": 0.05}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.6}, [0, 1]),  # of what top-k leaves: 0.5 / 0.95 < 0.6
    ],
)
def test_truncation_keeps_the_likeliest(options, kept):
    shares = torch.tensor([0.5, 0.3, 0.15, 0.05])
    found, token, logprob = drawn(shares.log(), Sampling(**options))
    expected = torch.zeros(4)
    expected[kept] = shares[kept] / shares[kept].sum()
    assert found.nonzero()[:, 0].tolist() == kept
    assert torch.allclose(found, expected, atol=0.02)
    assert torch.allclose(logprob, shares.log()[token], atol=1e-6)  # of all tokens


def test_what_truncates():
    assert Sampling(top_k=5, top_p=1.0, min_p=0.1).truncation == "top_k=5, min_p=0.1"
    assert not Sampling(top_p=1.0, min_p=0.0).is_truncated and not Sampling(temperature=0, top_k=5).is_truncated
    for wrong in (-0.1, 1.5, "0.1"):
        with pytest.raises(ValueError, match=r"min_p=.* must be from 0 to 1"):
            Sampling(min_p=wrong)


def test_the_seed_decides():
    logits = torch.randn(64, 100)
    first, again, other = (
        choose(logits, Sampling(), ONE, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again) and not torch.equal(first, other)
