"""What several ranks would get silently wrong, and is refused: context parallelism, all ranks on one GPU."""

import pytest
import torch
from dist_cases import adamw, batch, converted, largest_difference, loss_of, plain, run, shard, simulated
from ranks import RankFailed, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import octavo
from octavo.decoders import attention
from octavo.dist import checkpoint
from octavo.nn.sharded import capture_error_mode, own_gpu


def in_context_parallel(rank):
    from torch.distributed.tensor.experimental import context_parallel

    model = converted("Llama", "block")
    inputs = batch("Llama", 0, 0)
    ids = torch.cat([inputs["input_ids"]] * 4, dim=1)[:, :32].contiguous()
    mesh = init_device_mesh("cpu", (2,))
    said, whole_attention = [], nn.functional.scaled_dot_product_attention
    for change in (lambda: None, lambda: model.set_attn_implementation("sdpa")):
        change()
        try:
            with context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1]):
                attention.refuse_distributed(model.config)
                model(input_ids=ids, labels=ids)
        except ValueError as error:
            said.append(str(error))
        except (NotImplementedError, RuntimeError):  # torch has it on GPUs only
            said.append("torch's own")
        # torch 2.11 leaves its own there after an error.
        nn.functional.scaled_dot_product_attention = whole_attention
    model.set_attn_implementation(attention.NAME)
    return said, loss_of(model, inputs).item()


def with_head_wrapped(rank, fp8_head):
    """By FSDP1, which puts a module of its own in the place of the head."""
    model = plain("Llama")
    octavo.convert_to_fp8(model, octavo.FP8TrainingConfig(fp8_head=fp8_head))
    model.lm_head = FullyShardedDataParallel(model.lm_head, device_id=torch.device("cpu"))
    output = model(**batch("Llama", 0, rank))
    return output.logits is not None, model.octavo_report.unfused, str(model.octavo_report)


def modes(_rank):
    return capture_error_mode()


def test_context_parallel_is_refused():
    for (ours, sdpa), loss in on_ranks(2, in_context_parallel):
        assert ours.startswith("context_parallel with attn_implementation='octavo': each rank would attend to its own")
        assert 'set_attn_implementation("sdpa")' in ours
        assert sdpa == "torch's own"
        assert loss > 0  # all is as before


def test_ulysses_is_refused(monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def ulysses():
        pass

    ulysses.__module__ = "deepspeed.runtime.sequence_parallel.ulysses_sp"
    model = converted("Llama", "block")
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", ulysses)
    with pytest.raises(ValueError, match="sequence parallelism by DeepSpeed with attn_implementation='octavo'"):
        model(**batch("Llama", 0, 0))


def test_a_head_that_is_wrapped_is_reported_and_never_silently_in_high_precision():
    reason = "lm_head is a FullyShardedDataParallel"
    for logits, unfused, report in on_ranks(2, with_head_wrapped, False):
        assert logits and unfused == {reason: 1}
        assert f"loss from all logits in 1 calls: {reason}" in report
    with pytest.raises(RankFailed, match=f"fp8_head=True: {reason}, so its product would be in high precision"):
        on_ranks(2, with_head_wrapped, True)


@pytest.mark.parametrize(
    ("local", "count", "current", "expected"),
    [("1", 4, 0, 1), (None, 4, 0, 0), ("3", 4, 2, 2), ("3", 1, 0, 0), ("0", 2, 0, 0)],
)
def test_each_rank_has_its_own_gpu(monkeypatch, local, count, current, expected):
    chosen = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    if local is None:
        monkeypatch.delenv("LOCAL_RANK", raising=False)
    else:
        monkeypatch.setenv("LOCAL_RANK", local)
    assert own_gpu() == expected
    assert chosen in ([], [expected])


def test_more_ranks_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ValueError, match="LOCAL_RANK=2: torch sees 2 GPUs here"):
        own_gpu()


def test_the_loader_uses_it(monkeypatch):
    """`FastLanguageModel` puts a model where the rank's own GPU is."""
    from octavo.hf import fast

    asked = {}

    def read(*_args, **options):
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(fast, "own_gpu", lambda: 3)
    monkeypatch.setattr(fast.reading, "check_name", lambda *_: None)
    monkeypatch.setattr(fast.reading, "read_adapter_config", lambda *_: None)
    monkeypatch.setattr(fast.reading, "read_model", read)
    with pytest.raises(InterruptedError):
        fast.FastLanguageModel.from_pretrained("a model", tokenizer=False)
    assert asked["device_map"] == {"": 3}


def test_graphs_are_captured_beside_the_threads_of_a_process_group():
    assert capture_error_mode() == "global"
    assert on_ranks(1, modes) == ["thread_local"]


def trainer_with_an_earlier_optimizer(rank):
    model = plain("MLP")
    optimizer = torch.optim.AdamW(model.parameters())
    shard(model)
    said = []
    for late in (model.parameters(), [*model.parameters(), torch.nn.Parameter(torch.zeros(3))]):
        for each in (optimizer, torch.optim.AdamW(late)):
            try:
                octavo.FP8Trainer(model, each)
                said.append("")
            except ValueError as error:
                said.append(str(error))
    return said


def test_an_optimiser_from_before_sharding_is_refused():
    words = "the optimiser holds a parameter that FSDPMLP has not: build it from the model's parameters, after the "
    for said in on_ranks(2, trainer_with_an_earlier_optimizer):
        assert [each.removesuffix("model is sharded") for each in said] == [words, "", words, words]
    model = plain("MLP")
    with pytest.raises(ValueError, match="the optimiser holds a parameter that MLP has not"):
        octavo.FP8Trainer(model, torch.optim.AdamW(plain("MLP").parameters()))
    octavo.FP8Trainer(model, torch.optim.AdamW([*model.parameters(), torch.nn.Parameter(torch.zeros(3))]))


def in_fsdp1(rank, folder):
    """A loop of one's own under FSDP1, and what FP8Trainer, checkpoints and exports say to it."""
    model = converted("Llama", "delayed")
    each_layer = ModuleWrapPolicy({type(model.model.layers[0])})
    cpu = torch.device("cpu")
    wrapped = FullyShardedDataParallel(model, auto_wrap_policy=each_layer, device_id=cpu, use_orig_params=True)
    optimizer = adamw(wrapped.parameters())
    run(rank, wrapped, "Llama", optimizer)
    calls = {
        "FP8Trainer": lambda: octavo.FP8Trainer(wrapped, optimizer),
        "save": lambda: checkpoint.save(f"{folder}/step", wrapped, optimizer),
        "load": lambda: checkpoint.load(f"{folder}/step", wrapped, optimizer),
        "export": lambda: octavo.export_fp8(model, f"{folder}/exported"),
    }
    said = {}
    for name, call in calls.items():
        with pytest.raises(ValueError, match=r"shard the model with torch.distributed.fsdp.fully_shard") as error:
            call()
        said[name] = str(error.value).partition(" (FSDP1)")[0]
    with FullyShardedDataParallel.summon_full_params(wrapped):
        whole = {
            name.replace("_fsdp_wrapped_module.", ""): p.detach().clone() for name, p in wrapped.named_parameters()
        }
    return {name: p.numpy() for name, p in whole.items()}, said


def test_fsdp1_trains_in_a_loop_and_is_refused_where_its_parts_would_be_taken_for_all(tmp_path):
    expected = simulated("Llama", "delayed")
    for parameters, said in on_ranks(2, in_fsdp1, str(tmp_path)):
        assert largest_difference(parameters, expected) == 0
        assert said == {
            "FP8Trainer": "FP8Trainer with FullyShardedDataParallel",
            "save": "octavo.dist.checkpoint with FullyShardedDataParallel",
            "load": "octavo.dist.checkpoint with FullyShardedDataParallel",
            "export": "saving with FullyShardedDataParallel",
        }
    assert not list(tmp_path.iterdir())
