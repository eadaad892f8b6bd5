"""A Triton that was not tested: its kernels are compared with the specification once, and wrong ones are refused."""

import pytest
import torch

from octavo.kernels import quantize, trust

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def untested(monkeypatch):
    monkeypatch.setattr(trust, "TESTED", ("0.0",))
    monkeypatch.setattr(trust, "TIMES", 1)
    monkeypatch.setattr(trust, "SHAPES", ((66, 66),))
    trust.require_right_kernels.cache_clear()
    yield
    trust.require_right_kernels.cache_clear()


def test_right_kernels_are_used(caplog):
    for _ in range(2):
        trust.require_right_kernels(CPU)
    assert len(caplog.records) == 1 and "comparing them first" in caplog.text


def test_wrong_kernels_are_refused(monkeypatch):
    plain = quantize.quantize_operand

    def wrong(*args, **kwargs):
        actual = plain(*args, **kwargs)
        actual[-1].data.view(torch.uint8)[-1, -1] ^= 1
        return actual

    monkeypatch.setattr(quantize, "quantize_operand", wrong)
    with pytest.raises(RuntimeError, match=r"compiles Octavo's kernels wrongly: quantize delayed.*emulate=True"):
        trust.require_right_kernels(CPU)


def test_tested_versions_are_trusted(monkeypatch):
    monkeypatch.setattr(trust, "TESTED", ("3.6",))
    monkeypatch.setattr(trust, "_wrong_kernels", None)
    trust.require_right_kernels(CPU)
