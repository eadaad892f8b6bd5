"""The order in which states travel, with streams that only keep a record of who waits for whom."""

from contextlib import contextmanager

import pytest
import torch
from decoder_cases import batch, build
from torch import nn

from octavo import FP8TrainingConfig, convert_to_fp8
from octavo.optim import build_optimizer, host_states, offload_master, step_in_backward
from octavo.optim.transfers import Transfers


class Stream:
    """Knows which operations are done before what comes next on it: its own, and those of what it has waited for."""

    def __init__(self, *_):
        self.seen = set()

    def wait_event(self, event):
        self.seen |= event

    def wait_stream(self, other):
        self.seen |= other.seen

    def record_event(self):
        return frozenset(self.seen)

    def synchronize(self):
        pass


class Watched(Transfers):
    """A GPU's transfers on a CPU. Fails if memory is used before the last use of it is done."""

    made = 0

    def __init__(self, device):
        super().__init__(device)
        self._in, self._out = Stream(), Stream()
        self.uses = {}
        self.count = 0

    def use(self, stream, tensor, what):
        key = tensor.untyped_storage().data_ptr()
        assert self.uses.get(key, frozenset()) <= stream.seen, f"{what} before the last use of that memory is done"
        self.count += 1
        stream.seen = stream.seen | {self.count}
        self.uses[key] = frozenset({self.count})

    def _land(self, x, trip):
        Watched.made += not self._free.get(x.nbytes)
        landed = super()._land(x, trip)
        self.use(self._in, x, "a copy from the host")
        self.use(self._in, landed, "a copy into a buffer")
        return landed


@pytest.fixture
def watched(monkeypatch):
    compute = Stream()

    @contextmanager
    def stream(_stream):
        yield

    monkeypatch.setattr(host_states, "Transfers", Watched)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: compute)
    Watched.made = 0
    return compute


def _train(weights, optimizer, steps):
    for i in range(steps):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(i))
        for weight in weights:
            x = torch.tanh(x @ weight)
        x.square().mean().backward()
        optimizer.step()


def _weights(count=6):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(64, 64) / 8) for _ in range(count)]


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_no_copy_overtakes_another(watched, name, count):
    weights = _weights(count)
    optimizer = build_optimizer(name, weights, 1e-2)
    handle = step_in_backward(optimizer, offload=True)
    step, send = handle._step, Watched.send

    def watched_step(optimizer):
        (parameter,) = optimizer.param_groups[0]["params"]
        transfers = handle.states._of(parameter)
        trip = handle.states._here[parameter]
        for buffer in trip.buffers:
            transfers.use(watched, buffer, "a step")
        return step(optimizer)

    def watched_send(self, state, host_copy, trip):
        fresh = set(state) - set(host_copy)
        event = send(self, state, host_copy, trip)
        if not fresh:
            for buffer in trip.buffers:
                self.use(self._out, buffer, "a copy out of a buffer")
            for value in (v for v in host_copy.values() if isinstance(v, torch.Tensor) and v.dim()):
                for part in [getattr(value, n) for n in ("codes", "scale", "qmap")] if name != "adamw" else [value]:
                    self.use(self._out, part, "a copy to the host")
            event = self._out.record_event()
            for buffer in trip.buffers:
                free = self._free[buffer.nbytes]
                last = next(i for i, (other, _) in enumerate(free) if other is buffer)
                free[last] = (buffer, event)
        return event

    handle._step = watched_step
    Watched.send = watched_send
    try:
        _train(weights, optimizer, 5)
    finally:
        Watched.send = send
    expected = _weights(count)
    plain = build_optimizer(name, expected, 1e-2)
    step_in_backward(plain)
    _train(expected, plain, 5)
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    # However many parameters there are, buffers for one that is stepped and for two that are on their way.
    states = {"adamw": 2, "adamw8bit": 6}[name]
    assert Watched.made <= 3 * states


@pytest.mark.usefixtures("watched")
def test_a_room_is_read_after_it_was_written():
    transfers, host_copy = Watched(torch.device("cpu")), {"x": torch.ones(3)}
    transfers.bring(host_copy, frozenset({"written"}))
    assert "written" in transfers._in.seen


class Replacing(torch.optim.Optimizer):
    """Counts steps in a new tensor each time."""

    def __init__(self, weights):
        super().__init__(weights, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self.state[parameter]["sum"] = self.state[parameter].get("sum", torch.zeros_like(parameter)) + 1


@pytest.mark.usefixtures("watched")
def test_states_that_an_optimizer_replaces_are_sent_all_the_same():
    weights = _weights(2)
    optimizer = Replacing(weights)
    handle = step_in_backward(optimizer, offload=True)
    _train(weights, optimizer, 3)
    handle.states.wait()
    assert all(torch.equal(optimizer.state[w]["sum"], torch.full_like(w, 3.0)) for w in weights)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_masters_travel_through_the_same_buffers(name):
    """Products of one, two and three weights, and parameters without a master between them."""
    results = []
    for offload in (True, False):
        model = build(num_hidden_layers=4)
        convert_to_fp8(model, FP8TrainingConfig.from_recipe("current"))
        optimizer = build_optimizer(name, model.parameters(), 1e-3)
        if offload:
            offload_master(model, optimizer)
        else:
            step_in_backward(optimizer)
        for _ in range(4):
            model(**batch()).loss.backward()
            optimizer.step()
        results.append(model.state_dict())
    assert all(torch.equal(results[0][key], results[1][key]) for key in results[1])
    assert Watched.made <= {"adamw": 30, "adamw8bit": 80}[name]  # for 39 parameters with 3 or up to 7 tensors each
