"""One token for all slots: as it is on a CPU, and a CUDA graph on a GPU.

Graphs run one after another and leave nothing but the state of the slots, so all of them share one pool of memory for
what is in between. They are recorded on one stream: libraries keep a workspace for each stream that they have seen.
"""

import torch

from octavo.nn.sharded import capture_error_mode
from octavo.rl.completions import Sampling
from octavo.rl.policy import Policy
from octavo.rl.sampling import choose
from octavo.rl.slots import Slots

_Way = tuple[bool, int | None, float | None, float | None]


class Recorder:
    """Where graphs are recorded: a stream and a pool of memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)
        self.pool = torch.cuda.graph_pool_handle()


class Step:
    """The step of so many slots, with a graph for each way to sample; temperature and stop tokens are data to it."""

    def __init__(self, policy: Policy, slots: Slots, generator: torch.Generator) -> None:
        self.policy, self.slots, self.generator = policy, slots, generator
        self._graphs: dict[_Way, torch.cuda.CUDAGraph] = {}

    def run(self, sampling: Sampling) -> None:
        """Write one token to each slot whose completion is not complete."""
        graph = self._graphs.get(_way(sampling))
        if graph is None:
            self._compute(sampling)
        else:
            graph.replay()

    def record(self, sampling: Sampling, recorder: Recorder) -> None:
        """Record a graph, if there is none yet. All slots must be empty: then a step changes nothing."""
        way = _way(sampling)
        if way in self._graphs:
            return
        stream, current = recorder.stream, torch.cuda.current_stream(recorder.device)
        with torch.cuda.device(recorder.device):  # a graph is of the current device
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(2):  # kernels are compiled, and libraries take their memory
                    self._compute(sampling)
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.generator)
            mode = capture_error_mode()
            with torch.cuda.graph(graph, pool=recorder.pool, stream=stream, capture_error_mode=mode):
                self._compute(sampling)
        self._graphs[way] = graph

    def forget(self) -> None:
        """Drop the graphs."""
        self._graphs.clear()

    def _compute(self, sampling: Sampling) -> None:
        slots = self.slots
        attends, positions = slots.begin_step()
        hidden = self.policy.hidden(attends, slots.token[:, None], positions[:, None])[:, 0]
        slots.append(*choose(self.policy.logits(hidden), sampling, slots.temperature, self.generator))


def _way(sampling: Sampling) -> _Way:
    if sampling.is_greedy:
        return True, None, None, None
    return False, sampling.top_k, sampling.top_p, sampling.min_p
