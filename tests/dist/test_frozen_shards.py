"""LoRA on a base frozen in FP8, sharded by FSDP2: every granularity, policies of torch 2.11, loading by Accelerate."""

import gc
from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

pytest.importorskip("peft")

import decoder_cases
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from octavo.dist import checkpoint
from octavo.dist.whole import cut, whole_state
from octavo.hf.quantizer import OctavoConfig
from octavo.nn import bits
from octavo.nn.frozen import FROZEN_GRANULARITIES, SCALE_NAME, FP8FrozenLinear
from octavo.nn.sharded import local

STEPS = 3
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    decoder_cases.build("Llama", hidden_size=192, intermediate_size=144).save_pretrained(path)
    return path


def adapted(folder, granularity):
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=OctavoConfig(granularity)).train()
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=LINEARS, task_type="CAUSAL_LM"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zeros would hide half of the gradients
            nn.init.normal_(parameter, std=0.02)
    return model


def shard(model, **options):
    for layer in model.get_base_model().model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def loss_of(model, step, rank):
    ids = torch.randint(1, 160, (2, 13), generator=torch.Generator().manual_seed(10 * step + rank))
    return model(input_ids=ids, labels=ids).loss


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def numbers(model):
    return {name: value.float().numpy() for name, value in whole_state(model).items() if "lora_" in name}


def train(rank, model, steps=STEPS):
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    for step in range(steps):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    return numbers(model)


def simulated(folder, granularity, world=2):
    """The adapters of ranks that are all in this process, each with its part of the batch and scales of its own."""
    models = [adapted(folder, granularity) for _ in range(world)]
    optimizers = [torch.optim.AdamW(trained(model), lr=1e-2) for model in models]
    for step in range(STEPS):
        for rank, model in enumerate(models):
            loss_of(model, step, rank).backward()
        for same in zip(*map(trained, models), strict=True):
            mean = sum(p.grad / world for p in same)
            for p in same:
                p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return numbers(models[0])


def farthest(actual, expected):
    assert actual.keys() == expected.keys() and expected
    return max(abs(actual[name] - expected[name]).max() for name in expected)


def train_shards(rank, folder, granularity):
    return train(rank, shard(adapted(folder, granularity)))


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_adapters_on_a_sharded_base_equal_simulated_ranks(folder, granularity):
    actual = on_ranks(2, train_shards, folder, granularity)[0]
    assert farthest(actual, simulated(folder, granularity)) == 0.0


def train_one_rank(rank, folder, granularity, old_rule, policy):
    if old_rule:
        _play_torch_2_11()
    model = shard(adapted(folder, granularity), **policy)
    loss_of(model, 0, rank)
    # Another base, and the first again, by assignment: shards are other tensors each time.
    own = {name: value.clone() for name, value in model.state_dict().items()}
    zeros = {name: value.clone() for name, value in own.items()}
    for name, value in zeros.items():
        if "base_layer" in name:
            local(value).zero_()
    model.load_state_dict(zeros, assign=True)
    without = loss_of(model, 0, rank).item()
    model.load_state_dict(own, assign=True)
    layer = model.get_base_model().model.layers[0]
    weights = {name: p for name, p in layer.named_parameters() if not p.requires_grad and not p.is_floating_point()}
    shards = {name: local(p).data_ptr() for name, p in weights.items()}
    results = train(rank, model)
    layer.unshard()
    gathered = {name: p.data_ptr() for name, p in layer.named_parameters() if name in shards}
    layer.reshard()
    return results, len(shards), gathered == shards, without


def test_one_rank_reads_a_shard_that_is_another_tensor():
    """FSDP2 makes the gathered Parameter once, and hands it to every later gather."""
    before, now = torch.ones(2, 3, dtype=torch.uint8), torch.full((2, 3), 2, dtype=torch.uint8)
    gathered = (torch.zeros(1, dtype=torch.uint8),)
    out = nn.Parameter(bits._take(gathered, before, None)[0], requires_grad=False)
    assert bits._take(gathered, before, None, out=out) is None and out.data_ptr() == before.data_ptr()
    assert bits._take(gathered, now, None, out=out) is None and out.data_ptr() == now.data_ptr()


def _play_torch_2_11():
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    _fsdp_param.FSDPParam.init_dtype_attrs = as_torch_2_11
    bits.casts_integers.cache_clear()


def zeroed_loss(folder, granularity):
    model = adapted(folder, granularity)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if "base_layer" in name:
                value.view(torch.uint8).zero_()
    return loss_of(model, 0, 0).item()


@pytest.mark.parametrize(
    ("granularity", "old_rule", "policy"),
    [("channel", False, {}), ("block", True, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)})],
)
def test_one_rank_copies_no_frozen_weight(folder, granularity, old_rule, policy):
    """A shard is all there is, and it is what linears read, also where it has become another tensor."""
    results, count, same, without = on_ranks(1, train_one_rank, folder, granularity, old_rule, policy)[0]
    assert count > 0 and same
    assert farthest(results, simulated(folder, granularity, world=1)) == 0.0
    assert without == zeroed_loss(folder, granularity)


def as_torch_2_11(self, policy):
    """`FSDPParam.init_dtype_attrs` of torch 2.11: whatever a parameter holds is cast."""
    self.orig_dtype = self.sharded_param.dtype
    self.reduce_dtype = None if policy.reduce_dtype == policy.param_dtype else policy.reduce_dtype
    self.param_dtype = None if policy.param_dtype == self.orig_dtype else policy.param_dtype


def test_integers_are_sharded_where_each_shard_requires_gradients():
    """FSDP2 of torch 2.11 calls `nn.Parameter(shard)`, whatever it holds."""
    integers, numbers = bits.ShardParameter(torch.zeros(2, dtype=torch.uint8)), bits.ShardParameter(torch.zeros(2))
    assert [type(integers), integers.requires_grad] == [nn.Parameter, False]
    assert [type(numbers), numbers.requires_grad] == [nn.Parameter, True]
    assert isinstance(numbers, bits.ShardParameter) and not isinstance(torch.zeros(2), bits.ShardParameter)


def train_under_a_policy(rank, folder, granularity, old_rule):
    if old_rule:
        from torch.distributed.fsdp._fully_shard import _fsdp_param

        _fsdp_param.FSDPParam.init_dtype_attrs = as_torch_2_11
        _fsdp_param.nn = SimpleNamespace(**{**vars(nn), "Parameter": bits.ShardParameter})
    assert bits.casts_integers() or not old_rule
    model = shard(adapted(folder, granularity), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return train(rank, model)


@pytest.mark.parametrize("granularity", ["block", "tensor"])
def test_the_rule_of_torch_2_11_does_not_cast_frozen_weights(folder, granularity):
    """On three ranks: 192 rows are even, 144 and the rows of scales are not, and a rank has none of a scale."""
    expected = on_ranks(3, train_under_a_policy, folder, granularity, False)[0]
    actual = on_ranks(3, train_under_a_policy, folder, granularity, True)[0]
    assert farthest(actual, expected) == 0.0


def cast_after_all(rank, folder):
    """Take the hooks away, as for shards in host memory: the error names the reason."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    FSDPParam.init_dtype_attrs = as_torch_2_11
    bits.casts_integers = lambda: False
    model = shard(adapted(folder, "block"), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"has cast them\. Update to torch 2\.13, or leave param_dtype out"):
        loss_of(model, 0, rank)


def test_weights_that_were_cast_are_an_error(folder):
    on_ranks(2, cast_after_all, folder)


def keep_nothing(rank, folder):
    model = shard(adapted(folder, "block"))
    before = bytes_of_integers()
    loss = loss_of(model, 0, rank)
    between = bytes_of_integers()
    loss.backward()
    whole = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, FP8FrozenLinear))
    return between - before, whole


def bytes_of_integers():
    """The memory of all tensors of bytes in this process: frozen weights, and whatever has been gathered of them."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter) and x.dtype == torch.uint8]
    return sum({id(s): s.nbytes() for s in (x.untyped_storage() for x in tensors)}.values())


def test_no_gathered_weight_is_kept_from_forward_to_backward(folder):
    for kept, whole in on_ranks(2, keep_nothing, folder):
        assert kept < whole / 100  # FP8 inputs that backward reads are tensors of another dtype


def load_as_accelerate_does(rank, folder, granularity):
    """Rank 0 has the weights, all models go to the meta device, are sharded there, and filled by assignment."""
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    from torch.distributed.tensor import _collective_utils

    distributed.broadcast = as_bytes(distributed.broadcast)
    _collective_utils.scatter = as_bytes(_collective_utils.scatter)
    model = adapted(folder, granularity)
    buffers = {name: (owner, key) for name, owner, key in buffers_of(model)}
    values = {name: getattr(owner, key).clone() for name, (owner, key) in buffers.items()}
    full = model.state_dict()
    model = model.to("meta")
    frozen = [m for m in model.modules() if isinstance(m, FP8FrozenLinear)]
    assert {m.weight.dtype for m in frozen} == {torch.float8_e4m3fn}
    shard(model)
    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=rank == 0), model, full if rank == 0 else {})
    for name, (owner, key) in buffers.items():
        owner.register_buffer(key, values[name], persistent=False)
    assert {local(m.weight).dtype for m in frozen} == {torch.uint8}
    assert {local(getattr(m, SCALE_NAME)).dtype for m in frozen} == {torch.int32}
    return train(rank, model)


def buffers_of(model):
    for name, module in model.named_modules():
        for key, _ in module.named_buffers(recurse=False):
            yield f"{name}.{key}", module, key


def as_bytes(collective):
    """Send FP8 as bytes, as NCCL does: gloo does not know it."""

    def view(x):
        if isinstance(x, list):
            return [view(each) for each in x]
        return x.view(torch.uint8) if isinstance(x, torch.Tensor) and x.element_size() == 1 else x

    return lambda *args, **kwargs: collective(*map(view, args), **{key: view(value) for key, value in kwargs.items()})


def test_a_base_that_accelerate_fills_by_assignment(folder):
    actual = on_ranks(2, load_as_accelerate_does, folder, "block")[0]
    assert farthest(actual, simulated(folder, "block")) == 0.0


def save_and_read(rank, folder, granularity):
    """The whole state of shards has the bytes, dtypes and shapes of one process; shards read it back."""
    model, expected = shard(adapted(folder, granularity)), adapted(folder, granularity).state_dict()
    state = whole_state(model)
    if rank == 0:
        assert list(state) == list(expected)
        for name, value in expected.items():
            assert (state[name].dtype, state[name].shape) == (value.dtype, value.shape), name
            assert torch.equal(bytes_of(state[name]), bytes_of(value)), name
    frozen = [m for m in model.modules() if isinstance(m, FP8FrozenLinear)]
    for module in frozen:
        local(module.weight).zero_()
        local(getattr(module, SCALE_NAME)).zero_()
    model.load_state_dict(cut(expected, model))
    again = whole_state(model)
    return all(torch.equal(bytes_of(again[name]), bytes_of(state[name])) for name in state)


def load_adapters(rank, folder, granularity, broadcast):
    """Load adapters as Accelerate does, into a sharded model: torch completes the state dict with the base."""
    model = shard(adapted(folder, granularity))
    before = whole_state(model)
    full = {name: value for name, value in adapted(folder, granularity).state_dict().items() if "lora_" in name}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            local(parameter.detach()).zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=False)
    set_model_state_dict(model, full if rank == 0 or not broadcast else {}, options=options)
    after = whole_state(model)
    return [name for name in before if not torch.equal(bytes_of(before[name]), bytes_of(after[name]))]


@pytest.mark.parametrize(("granularity", "broadcast"), [("tensor", True), ("channel", False), ("block", True)])
def test_adapters_alone_are_loaded_into_shards(folder, granularity, broadcast):
    assert on_ranks(2, load_adapters, folder, granularity, broadcast) == [[], []]


def save_checkpoint(rank, folder, path):
    checkpoint.save(path, shard(adapted(folder, "tensor")))


def test_a_checkpoint_of_two_ranks_is_read_by_one_process(folder, tmp_path):
    """With one scale for a whole weight, which has a dimension only where it is sharded."""
    on_ranks(2, save_checkpoint, folder, tmp_path / "checkpoint")
    model, expected = adapted(folder, "tensor"), adapted(folder, "tensor").state_dict()
    for module in (m for m in model.modules() if isinstance(m, FP8FrozenLinear)):
        module.weight.detach().zero_()
        getattr(module, SCALE_NAME).detach().zero_()
    checkpoint.load(tmp_path / "checkpoint", model)
    for name, value in model.state_dict().items():
        assert value.shape == expected[name].shape and torch.equal(bytes_of(value), bytes_of(expected[name])), name


def bytes_of(x):
    return x.reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("granularity", FROZEN_GRANULARITIES)
def test_files_of_a_sharded_base_are_those_of_a_whole_one(folder, granularity):
    assert on_ranks(2, save_and_read, folder, granularity) == [True, True]
