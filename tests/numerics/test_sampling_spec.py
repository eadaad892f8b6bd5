"""Tokens by the specification: Philox against published words, noise and tokens against their distributions."""

import pytest
import torch

from octavo.numerics.sampling import LARGEST, exponential, philox, sample

ONE = torch.ones(())


# From Random123's file of known answers: counters, keys, results.
@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox(counter, key, expected):
    seed = key[0] | key[1] << 32
    seed = torch.tensor([seed - 2**64 if seed >= 2**63 else seed])
    assert [int(word) for word in philox(tuple(torch.tensor([c]) for c in counter), seed)] == list(expected)


def test_noise_is_exponential():
    noise = exponential((300, 1001), torch.tensor([11])).double()
    count = noise.numel()
    assert abs(noise.mean() - 1) < 5 * count**-0.5 and abs(noise.var() - 1) < 5 * (8 / count) ** 0.5
    for bound in (1e-4, 0.01, 0.5, 3.0):
        share = -torch.expm1(torch.tensor(-bound, dtype=torch.float64))
        assert ((noise < bound).double().mean() - share).abs() < 5 * (share * (1 - share) / count).sqrt()
    assert noise.min() >= 2.0**-33 and noise.max() <= -torch.log(torch.tensor(1 - LARGEST))
    # Elements beside, below and of another seed have nothing to do with one another.
    other = exponential((300, 1001), torch.tensor([12])).double()
    for a, b in ((noise[:, 1:], noise[:, :-1]), (noise[1:], noise[:-1]), (noise[:, 4:], noise[:, :-4]), (noise, other)):
        assert abs(((a - 1) * (b - 1)).mean()) < 5 * a.numel() ** -0.5


def test_noise_depends_on_its_place_alone():
    seed = torch.tensor([-5])
    whole = exponential((7, 90), seed)
    assert torch.equal(exponential((3, 33), seed), whole[:3, :33])


def test_small_noise_keeps_its_bits(monkeypatch):
    """Both forms of −log(1 − u) are that number, to 2^-14 of it, on either side of where they change."""
    from octavo.numerics import sampling

    for bits in (0, 1, 5, 2**22 - 300, 2**22 + 300, 2**31, 2**32 - 1):
        monkeypatch.setattr(sampling, "philox", lambda counters, _, bits=bits: (counters[0] * 0 + bits,) * 4)
        u = torch.tensor((bits + 0.5) / 2**32, dtype=torch.float64).clamp(max=LARGEST)
        found = sampling.exponential((1, 1), torch.tensor([0])).double()
        assert found.item() == pytest.approx(-torch.log1p(-u).item(), rel=2.0**-14)


def test_shares_are_those_of_softmax():
    logits = torch.tensor([2.0, 0.0, 1.0, -torch.inf, -3.0])
    for seed, temperature in enumerate((0.5, 1.0, 2.0)):
        token, logprob = sample(logits.expand(20_000, -1), ONE * temperature, torch.tensor([seed]), False)
        expected = (logits / temperature).softmax(-1)
        shares = torch.bincount(token, minlength=5) / 20_000
        assert ((shares - expected).abs() <= 5 * (expected * (1 - expected) / 20_000).sqrt()).all()
        assert torch.allclose(logprob, expected.log()[token], atol=1e-6)


def test_greedy():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 0.0]])
    token, logprob = sample(logits, ONE * 7, torch.tensor([0]), True)
    assert token.tolist() == [1, 0]
    assert torch.allclose(logprob, logits.log_softmax(-1).gather(1, token[:, None])[:, 0])
