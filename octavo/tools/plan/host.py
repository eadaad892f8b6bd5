"""States and master weights in host memory: the part of them on the GPU, and the memory of the host.

They come to the GPU for the step of their parameter, those of the next `AHEAD` on their way (`optim/host_states.py`).
The parameters take turns, and after the last comes the first again:

    in backward      head, norm, last layer, …, first layer, embedding, and again the head, …
    all in step()    embedding, first layer, …, last layer, norm, head, and again the embedding, …

They land in buffers that are kept and used again (`optim/transfers.py`), so at every moment there are as many of each
size as turns that follow one another ever want: of the vocabulary's two, for head and embedding, or one if they are
tied. Masters are of layers' weights alone. Norms are too small to count.
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
    found: Counter[int] = Counter()
    for i in range(len(sizes)):
        found |= Counter((sizes * 2)[i : i + 1 + AHEAD])
    return found


def on_host(case: Case, option: Option) -> int:
    """Return bytes of pinned host memory; torch gives each tensor there a power of two."""
    found = 0
    if option.offload is not None:
        layer = [n * k for n, k in persistent.layer_matrices(case)]
        found += case.layers * sum(_power_of_two(n * each) for n in layer for each in _of_layers(case, option))
        vocabulary = [persistent.vocabulary_parameters(case)] * (1 if persistent.is_tied(case) else 2)
        found += sum(_power_of_two(n * each) for n in vocabulary for each in persistent.state_bytes(case, option))
    if option.checkpointing == "offload":
        found += case.layers * layer_input(case, option)
    return found


def _of_layers(case: Case, option: Option) -> tuple[float, ...]:
    """Return bytes per element of each tensor that is transferred."""
    if option.offload == "master":
        return (FP32, *persistent.state_bytes(case, option, of_master=True))
    return persistent.state_bytes(case, option)


def _power_of_two(size: float) -> int:
    return 1 << (round(size) - 1).bit_length()
