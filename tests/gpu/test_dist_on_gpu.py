"""Several ranks need NCCL; one rank shows that it, DDP, FSDP2, FP8 gather and CUDA graphs go together on a GPU."""

import tempfile

import pytest
import torch
from torch import distributed, nn

import octavo
from octavo.decoders import graphs
from octavo.dist import amax, reduce
from octavo.dist.collectives import all_gather
from octavo.dist.shards import Product, Shard
from octavo.numerics import FP8ScalingManager
from octavo.numerics.amax import finite_amax
from octavo.ops.quantize import matrix_amax
from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.random_model import build_causal_lm, decoder_layers
from octavo.tools.shapes import LLAMAS, Case

SHAPE = {**LLAMAS["tiny"], "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}
RECIPES = ("delayed", "current", "channel", "block", "mx")


@pytest.fixture(scope="module", autouse=True)
def _nccl():
    torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
        yield
        distributed.destroy_process_group()


def batches(count=4):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(512, (2, 128), generator=generator).cuda()] * count  # the same again: it can be learned


def make(recipe, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = build_causal_lm(SHAPE, layers=3, positions=128, device="cuda", dtype=dtype).train()
    octavo.convert_to_fp8(model, octavo.FP8TrainingConfig.from_recipe(recipe))
    return model


def wrap(model, way):
    from torch.distributed.fsdp import fully_shard

    if way == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if way.startswith("fsdp2"):
        for layer in decoder_layers(model):
            fully_shard(layer)
        fully_shard(model)
    if "gather" in way:
        octavo.fp8_all_gather(model)
    return model


def losses(model, lr=1e-3):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=lr)
    found = []
    for tokens in batches():
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found).tolist()


@pytest.mark.parametrize("recipe", RECIPES)
def test_losses_are_those_of_one_process(recipe):
    expected = losses(make(recipe))
    assert expected[-1] < expected[0]
    for way in ("ddp", "fsdp2", "fsdp2, FP8 gather"):
        assert (way, losses(wrap(make(recipe), way))) == (way, expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_in_host_memory_is_sharded_onto_the_gpu(recipe):
    """`fully_shard` moves the data of parameters, as in a Trainer with FSDP, which leaves the model where it was."""
    expected = losses(wrap(make(recipe), "fsdp2"))
    assert losses(wrap(make(recipe).cpu(), "fsdp2")) == expected


@pytest.mark.parametrize("recipe", ["delayed", "block", "mx"])
def test_gather_of_fp32_weights_and_activations_computed_again(recipe):
    def checkpointed(way):
        model = make(recipe, torch.float32)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with torch.autocast("cuda", torch.bfloat16):
            return losses(wrap(model, way))

    assert checkpointed("fsdp2, FP8 gather") == checkpointed("fsdp2")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 130), (1000, 256), (512, 4096)])
def test_amax_of_shards(rows, columns, dtype):
    x = torch.randn(rows, columns, device="cuda", dtype=dtype)
    x[rows // 2, columns // 2] = float("inf")
    assert torch.equal(matrix_amax(x, by_column=False), finite_amax(x)[0].view(1))
    finite = torch.where(x.isfinite(), x, 0).abs().amax(dim=0).float()
    assert torch.equal(matrix_amax(x, by_column=True), finite)


@pytest.mark.parametrize("recipe", RECIPES)
def test_quantising_a_shard_waits_for_nothing(recipe):
    config = octavo.FP8TrainingConfig.from_recipe(recipe)
    state = FP8ScalingManager(device="cuda").register("w")
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16)
    product = Product(config.recipe.w, state, 256, [Shard(512, 512, 0, 0)], 1)
    down = {layout: product.groups[layout].counts(512, 256) for layout in product.shared}
    product.scales = {layout: torch.ones(counts, device="cuda").squeeze() for layout, counts in down.items()}
    product.scales = {n: s if recipe in ("delayed", "current") else s.view(down[n]) for n, s in product.scales.items()}
    for layout in product.layouts:
        product.quantize(layout, product.shards[0], x)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layout in product.layouts:
            product.quantize(layout, product.shards[0], x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_sharing_amax_waits_for_nothing():
    model = make("delayed")
    octavo.share_amax(model)
    manager = amax.managers_of(model)[0]
    losses(model)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        manager.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_small_gradients(dtype):
    g = torch.randn(1, 1000, device="cuda")
    g[0, 7] = float("nan")
    total = reduce.exchange_and_sum(g, dtype, None)
    finite = g[0].isfinite()
    assert torch.equal(total.isfinite(), finite)
    assert (total - g[0])[finite].norm() <= 0.03 * g[0][finite].norm()
    expected = losses(wrap(make("delayed"), "ddp"))
    model = wrap(make("delayed"), "ddp")
    octavo.reduce_gradients(model, dtype)
    assert losses(model) == pytest.approx(expected, rel=5e-3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_nccl_takes_float8(dtype):
    sent = torch.arange(256, dtype=torch.uint8, device="cuda").view(dtype)
    received = torch.zeros(256, dtype=torch.uint8, device="cuda").view(dtype)
    all_gather(received, sent)
    assert torch.equal(received.view(torch.uint8), sent.view(torch.uint8))
    distributed.broadcast(sent, 0)
    assert sent.view(torch.uint8).tolist() == list(range(256))


def test_graphs_are_recorded_while_nccl_is_up():
    def run(graphed):
        case = Case("small", SHAPE, 3, 256, 128, 0, "cuda", frozen=True, rank=8)
        model = PreparedModel(case, Contender("octavo channel", "octavo", False, "channel")).model.train()
        if graphed:
            octavo.use_cuda_graphs(model)
        found = losses(nn.parallel.DistributedDataParallel(model))
        assert graphs.recordings(model) == int(graphed)
        return found

    assert run(True) == run(False)
