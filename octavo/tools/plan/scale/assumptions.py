"""Assumptions of a plan for several GPUs, each of which an option or an argument replaces.

bandwidth     bus bandwidth of all-gather, reduce-scatter and all-reduce by the number of GPUs, as nccl-tests has it:
              bytes that a rank sends, per second. Between two numbers of GPUs it is interpolated, by their logarithm
network       bytes per second of a GPU's own network card. An all-to-all across nodes has no more: rings share the
              cards of a node, an all-to-all cannot (github.com/NVIDIA/nccl-tests/issues/267: 48 of 50 GB/s)
slowdown      share of their speed that computing and communication lose while both run: they share multiprocessors and
              memory
latency       seconds that a collective takes however few its bytes
rates         FLOP/s of a step on one GPU, forward and backward, as `octavo bench` measured them
at_tokens     tokens of those measurements. What FP8 spends on weights does not shrink with the tokens, so it is set
              apart; None takes all of a step in proportion to its tokens
quantise_rate, copy_rate, optimizer_rate
              bytes per second of quantising weights, of copies in and out of an engine's buffers, and of AdamW. An
              infinite rate leaves its part out
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from octavo.kernels.tuning import HOPPER
from octavo.tools.plan.options import Option
from octavo.tools.shapes import Case
from octavo.training.errors import UserError

# GB/s of a node of eight H100 or H200 with NVLink, and of many with a 400 Gb/s card for each GPU. Not measured here.
BANDWIDTH = {8: 370.0, 64: 320.0, 128: 305.0, 256: 280.0, 512: 245.0}
NODE = 8
NETWORK = 48.0
SLOWDOWN = 0.12
AT_TOKENS = 8192
NCCL_GIB = 1.0  # of its own, outside torch's memory
# TFLOP/s of a compiled step on an H200, 8,192 tokens in sequences of 2,048: files of `benchmarks/results` by width. A
# test reads them there. 1b has no figure with the head in BF16: the one in FP8, less what that is worth on an 8b.
FULL = {
    2048: {"hf": 515.4, "own": 564.5, "delayed": 807.3},
    3072: {"hf": 564.7, "own": 590.7, "delayed": 844.1},
    4096: {"hf": 605.1, "own": 613.2, "delayed": 949.5, "block": 774.1},
}
LORA = {"hf": 522.5, "own": 534.3, "channel": 778.2, "block": 706.3}  # on an 8b, rank 32, all linears


@dataclass(frozen=True)
class Assumptions:
    """Assumptions by the names above; bandwidths in GB/s. `tflops`: of BF16 and FP8, instead of measured rates."""

    bandwidth: Mapping[int, float] = field(default_factory=lambda: dict(BANDWIDTH))
    network: float = NETWORK
    node: int = NODE
    slowdown: float = SLOWDOWN
    latency: float = 20e-6
    tflops: tuple[float, float] | None = None
    at_tokens: int | None = AT_TOKENS
    quantise_rate: float = HOPPER.rates.bytes
    copy_rate: float = 4.2e12  # of the H200 in benchmarks/results/2026-11-16-h200-8b-32l-kernels.json
    # 26 bytes a parameter, of 1.5 billion, in 19.5 ms: benchmarks/results/2026-11-16-h200-1b-masters-in-one-pass.json.
    optimizer_rate: float = 2.0e12

    def __post_init__(self) -> None:
        named = {"bandwidth": min(self.bandwidth.values(), default=0.0), "network": self.network}
        named |= {"tflops": min(self.tflops)} if self.tflops else {}
        for name, value in named.items():
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"--{name} {value:g}: a number above 0")
        if not 0 <= self.slowdown < 1:
            raise UserError(f"--slowdown {self.slowdown:g}: a share from 0 to below 1, such as {SLOWDOWN}")

    def bus(self, gpus: int) -> float:
        """Return bytes per second of a ring of so many GPUs."""
        known = sorted(self.bandwidth)
        below = max((n for n in known if n <= gpus), default=known[0])
        above = min((n for n in known if n >= gpus), default=known[-1])
        low, high = self.bandwidth[below], self.bandwidth[above]
        if below == above or not below <= gpus <= above:
            return 1e9 * (low if below <= gpus else high)
        return 1e9 * (low + (high - low) * math.log(gpus / below) / math.log(above / below))

    def ring_seconds(self, sent: float, gpus: int) -> float:
        """Return the time of an all-gather, a reduce-scatter or an all-reduce in which a rank sends so many bytes."""
        return sent / self.bus(gpus) + self.latency if sent else 0.0

    def exchange_seconds(self, sent: float, gpus: int) -> float:
        """Return the time of an all-to-all. What goes to other nodes passes a GPU's own card, beside the rest."""
        if not sent:
            return 0.0
        if gpus <= self.node:
            return self.ring_seconds(sent, gpus)
        within = sent * (self.node - 1) / (gpus - 1)
        return max(within / self.bus(self.node), (sent - within) / (self.network * 1e9)) + self.latency

    def flops(self, case: Case, option: Option) -> float:
        """Return FLOP/s of a step: those given, or those measured on the model of the nearest width."""
        if self.tflops is not None:
            return 1e12 * self.tflops[option.code == "fp8"]
        what = str(option.recipe) if option.code == "fp8" else option.code
        width = measured_width(case)
        if not case.frozen:
            ratio = 1.0 if what in FULL[width] else FULL[width]["delayed"] / FULL[4096]["delayed"]
            return 1e12 * ratio * FULL[width if what in FULL[width] else 4096][what]
        same = "delayed" if option.code == "fp8" else what
        return 1e12 * LORA[what] * FULL[width][same] / FULL[4096][same]

    def in_words(self, case: Case, gpus: Sequence[int]) -> list[str]:
        """Return each assumption that matters for these numbers of GPUs as a sentence."""
        name = {2048: "1b", 3072: "3b", 4096: "8b"}[measured_width(case)]
        lines = [
            f"Computing at {self.tflops[0]:g} TFLOP/s in BF16 and {self.tflops[1]:g} in FP8 (--tflops)."
            if self.tflops
            else f"Computing as fast as octavo bench measured it on one H200, with the width of a {name} (--tflops)."
        ]
        several = [n for n in gpus if n > 1]
        if several:
            rings = ", ".join(f"{self.bus(n) / 1e9:.0f} on {n}" for n in several)
            lines.append(f"Bus bandwidth in GB/s: {rings} GPUs (--bandwidth).")
        if max(gpus) > self.node:
            lines.append(
                f"Nodes of {self.node} GPUs; an all-to-all, which FP8 reduce is, crosses them at {self.network:g} GB/s "
                "a GPU (--network)."
            )
        if several:
            lines.append(
                f"Computing and NCCL each lose {self.slowdown:.0%} while both run (--slowdown); one unit is gathered "
                f"ahead; {self.latency * 1e6:g} µs a collective; NCCL takes {NCCL_GIB:g} GiB."
            )
        return lines


def measured_width(case: Case) -> int:
    """Return the width, of those measured, that is nearest to the model's."""
    hidden = case.config["hidden_size"]
    return min(FULL, key=lambda width: abs(math.log(width / hidden)))


def parse_bandwidth(text: str) -> dict[int, float]:
    """Parse `370`, or by numbers of GPUs `8:370,64:320`."""
    wanted = f"--bandwidth {text}: GB/s such as 370, or by numbers of GPUs such as 8:370,64:320"
    found: dict[int, float] = {}
    for part in text.split(","):
        gpus, colon, value = part.rpartition(":")
        try:
            found[int(gpus) if colon else 1] = float(value)
        except ValueError as error:
            raise UserError(wanted) from error
    if ("," in text and len(found) != text.count(":")) or min(found) < 1:
        raise UserError(wanted)
    return found


def parse_tflops(text: str) -> tuple[float, float]:
    """Parse `605,950`: of BF16, of FP8."""
    try:
        bf16, fp8 = (float(part) for part in text.split(","))
    except ValueError as error:
        raise UserError(f"--tflops {text}: two numbers, of BF16 and of FP8, such as 605,950") from error
    return bf16, fp8
