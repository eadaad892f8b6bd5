"""States and master weights in host memory: the part of them on the GPU, and the memory of the host.

They are copied to the GPU for the step of their parameter, and those of the next `AHEAD` are prefetched
(`optim/host_states.py`). Parameters are stepped in a cycle:

    in backward      head, norm, last layer, …, first layer, embedding, and again the head, …
    all in step()    embedding, first layer, …, last layer, norm, head, and again the embedding, …

They are copied into buffers that are reused (`optim/transfers.py`), so there are as many of each size as consecutive
parameters ever need at once: two of the vocabulary's, for head and embedding, or one if they are tied. Only weights of
layers have masters. Norms are too small to count.
"""

from collections import Counter

from octavo.optim.host_states import AHEAD
from octavo.tools.plan import persistent
from octavo.tools.plan.layer import FP32, layer_input
from octavo.tools.plan.options import Option
from octavo.tools.shapes import Case


def on_gpu(case: Case, option: Option) -> int:
    """Return bytes of states on the GPU, including buffers for offloaded states and master weights."""
    if option.offload is None:
        return persistent.states(case, option)
    vocabulary = persistent.vocabulary_parameters(case) * (1 if persistent.is_tied(case) else 2)
    layer = sum(size * count for size, count in _at_once(case).items())
    return round(vocabulary * sum(persistent.state_bytes(case, option)) + layer * sum(_of_layers(case, option)))


def _at_once(case: Case) -> Counter[int]:
    """Return how many matrices of each size may be on the GPU at once: the one being stepped, and the next ones."""
    sizes = [n * k for n, k in persistent.layer_matrices(case)]
    largest: Counter[int] = Counter()
    for i in range(len(sizes)):
        largest |= Counter((sizes * 2)[i : i + 1 + AHEAD])
    return largest


def on_host(case: Case, option: Option) -> int:
    """Return bytes of pinned host memory; torch gives each tensor there a power of two."""
    total = 0
    if option.offload is not None:
        layer = [n * k for n, k in persistent.layer_matrices(case)]
        total += case.layers * sum(_power_of_two(n * each) for n in layer for each in _of_layers(case, option))
        vocabulary = [persistent.vocabulary_parameters(case)] * (1 if persistent.is_tied(case) else 2)
        total += sum(_power_of_two(n * each) for n in vocabulary for each in persistent.state_bytes(case, option))
    if option.checkpointing == "offload":
        total += case.layers * layer_input(case, option)
    return total


def _of_layers(case: Case, option: Option) -> tuple[float, ...]:
    """Return bytes per element of each tensor that is transferred."""
    if option.offload == "master":
        return (FP32, *persistent.state_bytes(case, option, of_master=True))
    return persistent.state_bytes(case, option)


def _power_of_two(size: float) -> int:
    return 1 << (round(size) - 1).bit_length()
