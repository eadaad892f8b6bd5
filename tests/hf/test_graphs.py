"""CUDA graphs are refused where there are none, and replayed only while nothing they rely on has changed.

Recording itself is for `tests/gpu`; here a stand-in is recorded, and what is looked at is when it would be replayed.
"""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import peft
import pytest
import torch
from torch import nn

import octavo
from octavo.decoders import graphs
from octavo.decoders.choice import set_products
from octavo.nn.frozen import FP8FrozenLinear
from octavo.tools.bench.random_model import build_causal_lm
from octavo.tools.shapes import LLAMAS


def tiny():
    return build_causal_lm(LLAMAS["tiny"], layers=1, positions=64, device="cpu")


def test_refused():
    with pytest.raises(ValueError, match="Linear is not a decoder that Octavo has fused"):
        octavo.use_cuda_graphs(nn.Linear(2, 2))
    model = tiny()
    with pytest.raises(ValueError, match="call convert_to_fp8 first"):
        octavo.use_cuda_graphs(model)
    octavo.convert_to_fp8(model)
    with pytest.raises(ValueError, match="the model is on cpu; move it to a GPU first"):
        octavo.use_cuda_graphs(model)
    octavo.use_cuda_graphs(model, False)


def test_no_mask_is_looked_at_without_graphs():
    model = tiny()
    octavo.convert_to_fp8(model)
    tokens = torch.randint(256, (1, 64))
    loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss
    loss.backward()
    assert loss.isfinite()


class Recording:
    """As `graphs._Recorded`, but what is replayed is computed."""

    made = 0

    def __init__(self, decoder, _tokens):
        Recording.made += 1
        self.parameters = [p for p in decoder.parameters() if p.requires_grad]
        self._state = graphs.state_of(decoder)

    still_holds = graphs._Recorded.still_holds

    def is_waiting(self):
        return False


class Replay:
    replayed = 0
    last = None

    @staticmethod
    def apply(recorded, *_):
        Replay.replayed += 1
        Replay.last = recorded


@pytest.fixture
def recording(monkeypatch):
    monkeypatch.setattr(graphs, "_made", Recording)
    monkeypatch.setattr(graphs, "_Replay", Replay)


def with_graphs(model):
    """As `use_cuda_graphs` would, were there a GPU."""
    causal = graphs._fused_model(model)
    linears = [module for module in causal.modules() if isinstance(module, graphs.LinearInFP8)]
    causal.__dict__["_octavo_graphs"] = graphs._Graphs(causal, linears, 0, 4)
    return model


def adapted():
    model = tiny()
    octavo.convert_to_fp8(model, precision="bf16")
    config = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return with_graphs(peft.get_peft_model(model, config).train())


def is_replayed(model, **more):
    """Whether this step is; the loss is computed in any case, since the stand-in has none."""
    before = Replay.replayed
    tokens = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens, use_cache=False, **more).loss.backward()
    return Replay.replayed > before


@pytest.mark.usefixtures("recording")
def test_replayed_while_values_change():
    model = adapted()
    made = Recording.made
    assert is_replayed(model) and is_replayed(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    with model.disable_adapter(), torch.no_grad():
        model(input_ids=torch.zeros(1, 64, dtype=torch.int64))
    model.eval()
    model.train()
    assert is_replayed(model) and Recording.made == made + 1


def layer_of(model):
    return graphs._fused_model(model).model.layers[0]


def unfreeze(model):
    layer_of(model).input_layernorm.weight.requires_grad_(True)


def freeze(model):
    layer_of(model).self_attn.q_proj.lora_A["default"].weight.requires_grad_(False)


def scale(model):
    layer_of(model).self_attn.q_proj.scaling["default"] *= 2


def move_frozen(model):
    weight = layer_of(model).self_attn.k_proj.weight
    weight.data = weight.data.clone()


def replace_parameter(model):
    adapter = layer_of(model).self_attn.q_proj.lora_A["default"]
    adapter.weight = nn.Parameter(adapter.weight.detach())


def one_in_eval(model):
    layer_of(model).self_attn.q_proj.lora_dropout.eval()


def less_dropout(model):
    layer_of(model).self_attn.q_proj.lora_dropout["default"].p = 0.05


def merge(model):
    layer_of(model).self_attn.q_proj.merge()


def another_adapter(model):
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["v_proj"], task_type="CAUSAL_LM"))
    model.base_model.set_adapter(["default", "other"])


def rope(model):
    embedding = graphs._fused_model(model).model.rotary_emb
    embedding.inv_freq = embedding.inv_freq.clone()


CHANGES = (
    unfreeze, freeze, scale, move_frozen, replace_parameter, one_in_eval, less_dropout, merge, another_adapter, rope
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("recording")
def test_what_was_recorded_has_changed(change):
    model = adapted()
    assert is_replayed(model)
    graph = graphs._fused_model(model).__dict__["_octavo_graphs"]
    (old,) = graph.recorded.values()
    change(model)
    assert not is_replayed(model) or Replay.last is not old
    assert is_replayed(model) and Replay.last is not old
    trained = [p for p in graph.decoder.parameters() if p.requires_grad]
    assert list(map(id, Replay.last.parameters)) == list(map(id, trained))


def test_products_of_frozen_weights_are_part_of_the_state():
    linear = FP8FrozenLinear.from_linear(nn.Linear(32, 32), "channel")
    before, states = graphs.state_of(linear), []
    for products in (True, False, "dgrad"):
        set_products([linear], products)
        states.append(graphs.state_of(linear))
    assert states[0] == before and before != states[1] != states[2] != before


@pytest.mark.usefixtures("recording")
def test_autocast_is_another_recording():
    model = adapted()
    assert is_replayed(model) and graphs.recordings(model) == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert is_replayed(model) and graphs.recordings(model) == 2
    assert is_replayed(model) and graphs.recordings(model) == 2


@pytest.mark.usefixtures("recording")
def test_hooks_are_refused():
    model = adapted()
    assert is_replayed(model)
    called = []
    layer_of(model).mlp.register_forward_hook(lambda *_: called.append(1))
    assert not is_replayed(model) and called == [1]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp has hooks, which a replay would not call"):
        is_replayed(model)
    octavo.use_cuda_graphs(model, False)
    assert not is_replayed(model) and called == [1, 1]


@pytest.mark.usefixtures("recording")
def test_another_forward_is_refused():
    model = adapted()
    assert is_replayed(model)
    mlp = layer_of(model).mlp
    own, called = mlp.forward, []
    mlp.forward = lambda x: called.append(1) or own(x)
    assert not is_replayed(model) and called == [1]
    with pytest.raises(ValueError, match=r"layers\.0\.mlp has hooks"):
        is_replayed(model)


@pytest.mark.usefixtures("recording")
def test_what_transformers_leaves_behind_is_no_hindrance():
    model = adapted()
    assert not is_replayed(model, output_hidden_states=True)
    assert is_replayed(model)
    graphs._fused_model(model).config.output_hidden_states = True
    assert not is_replayed(model)


@pytest.mark.usefixtures("recording")
def test_what_moves_all_the_time_is_refused():
    model = adapted()
    made = Recording.made
    with pytest.raises(RuntimeError, match="has changed at once, 3 times"):
        for _ in range(12):
            is_replayed(model)
            move_frozen(model)
    assert Recording.made == made + graphs.CHANGES and graphs.recordings(model) == 0


@pytest.mark.usefixtures("recording")
def test_what_changes_now_and_then_is_not():
    model = adapted()
    for _ in range(2 * graphs.CHANGES):
        assert is_replayed(model) and is_replayed(model)
        move_frozen(model)
        assert not is_replayed(model)


@pytest.mark.usefixtures("recording")
def test_a_copy_of_the_model_records_by_itself():
    model = adapted()
    assert is_replayed(model)
    other = copy.deepcopy(model)
    assert graphs.recordings(other) == 0 and is_replayed(other) and graphs.recordings(model) == 1
    assert graphs._fused_model(other).__dict__["_octavo_graphs"].decoder is graphs._fused_model(other).model


@pytest.mark.usefixtures("recording")
def test_another_recipe_is_not_replayed_from_the_old():
    model = tiny()
    octavo.convert_to_fp8(model, octavo.FP8TrainingConfig.from_recipe("delayed"))
    assert is_replayed(with_graphs(model))
    octavo.restore(model)
    octavo.convert_to_fp8(model, octavo.FP8TrainingConfig.from_recipe("block"))
    assert not is_replayed(model)


def test_recording_is_no_step_for_histories(monkeypatch):
    """Also where there is none, in BF16; and where the recording breaks off."""

    def broken(decoder, _tokens):
        for module in decoder.modules():
            if isinstance(module, graphs.LinearInFP8):
                module.state_x.add_(1)
        raise RuntimeError("no")

    monkeypatch.setattr(graphs, "_made", broken)
    with pytest.raises(RuntimeError, match="no") as caught:
        is_replayed(adapted())
    assert "use_cuda_graphs(model, False) trains without" in caught.value.__notes__[0]
    model = tiny()
    scaling = octavo.convert_to_fp8(model).scaling
    before = [state.clone() for state in scaling.states]
    tokens = torch.zeros(1, 64, dtype=torch.int64)
    graph = graphs._Graphs(model, [m for m in model.modules() if isinstance(m, graphs.LinearInFP8)], 0, 4)
    with pytest.raises(RuntimeError, match="no"):
        graph._record("key", tokens)
    assert all(torch.equal(*pair) for pair in zip(scaling.states, before, strict=True))


def test_casts_are_not_kept_while_recording():
    weight, x = nn.Parameter(torch.ones(4, 4)), torch.ones(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with graphs._no_cached_casts():
            nn.functional.linear(x, weight)
            with torch.no_grad():
                weight.zero_()
            assert not nn.functional.linear(x, weight).any()
        assert torch.is_autocast_cache_enabled()


def test_two_threads_do_not_share_a_recording(monkeypatch):
    """It has one place for its tokens: whoever comes second, before the first one's backward, computes without."""
    taken, second, replayed = [], threading.Event(), []

    class Shared(Recording):
        def is_waiting(self):
            return bool(taken)

    class Slow:
        @staticmethod
        def apply(_recorded, tokens, *_):
            replayed.append(tokens)
            if len(replayed) > 1:
                second.set()
            second.wait(0.3)  # for one that comes in between; nobody should
            taken.append(True)

    monkeypatch.setattr(graphs, "_made", Shared)
    monkeypatch.setattr(graphs, "_Replay", Slow)
    model = adapted()
    tokens = torch.randint(256, (1, 64))
    with ThreadPoolExecutor(2) as pool:
        losses = list(pool.map(lambda _: model(input_ids=tokens, labels=tokens, use_cache=False).loss, range(2)))
    assert len(replayed) == 1 and all(loss.isfinite() for loss in losses)
