"""Which figures a device gets, that tables have all that kernels ask for, and which tiles kernels refuse."""

from dataclasses import replace

import pytest
import torch

from octavo.kernels import decode_tiles, gated, quantize, trust, tuning
from octavo.kernels.adapters import gradients
from octavo.kernels.gated import blocks, low_rank
from octavo.kernels.gated.activations import ACTIVATIONS
from octavo.kernels.launch import LaunchCache
from octavo.kernels.quantize import dequantize, modes
from octavo.kernels.tuning import ADA, BLACKWELL, HOPPER
from octavo.numerics import FP8TrainingConfig, Quantized, activation
from octavo.numerics import quantize as quantize_spec
from octavo.numerics.config import RECIPES
from octavo.numerics.quantize import GRANULARITIES, Granularity
from octavo.numerics.scaling import new_states


@pytest.mark.parametrize(
    "capability, expected",
    [((8, 0), ADA), ((8, 9), ADA), ((9, 0), HOPPER), ((10, 0), BLACKWELL), ((10, 3), BLACKWELL), ((12, 0), BLACKWELL)],
    ids=str,
)
def test_figures_by_compute_capability(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    tuning.tuning_for.cache_clear()
    device = torch.device("cuda", 0)
    try:
        assert tuning.tuning_for(device) is expected
        assert tuning.may_overlap(device) is (capability >= (9, 0))
        assert tuning.tuning_for(device).gemm.cublas_blocks is (capability[0] == 9)
    finally:
        tuning.tuning_for.cache_clear()


def test_without_a_gpu_kernels_are_hoppers():
    assert tuning.tuning_for(torch.device("cpu")) is tuning.tuning_for(torch.device("meta")) is HOPPER
    assert tuning.may_overlap(torch.device("meta")) and not tuning.may_overlap(torch.device("cpu"))


def test_every_architecture_has_tiles_for_every_recipe():
    for _, figures in tuning.ARCHITECTURES:
        for name in RECIPES:
            for recipe in (getattr(FP8TrainingConfig.from_recipe(name).recipe, operand) for operand in "xwg"):
                rows, columns = modes.modes_of(recipe, "both")
                assert modes.tile_of(figures.quantize, rows, 0, False).programs >= 1
                assert modes.NAMES.get(columns, "channel") in figures.quantize.whole_columns
        widest = [tiles.wide[-1].widest for tiles in figures.quantize.whole_rows.values()]
        assert min(widest) == max(widest) == 32_768


# What Triton 3.6 took for Hopper: dtype, bytes or not, rows, tile of keys, warps and stages, shared memory; 256 wide.
TAKEN = [
    (torch.float32, False, 64, (64, 4, 3), 344_320),
    (torch.float32, False, 64, (32, 2, 2), 139_520),
    (torch.float32, False, 64, (16, 2, 1), 81_920),
    (torch.float32, True, 64, (64, 2, 3), 214_016),
    (torch.float32, True, 64, (16, 2, 1), 86_016),
    (torch.bfloat16, False, 64, (64, 4, 3), 229_376),  # with Hopper's own products
    (torch.bfloat16, False, 64, (32, 2, 4), 135_168),
    (torch.bfloat16, False, 64, (16, 2, 1), 49_152),
    (torch.bfloat16, True, 64, (64, 2, 3), 107_520),
    (torch.bfloat16, True, 64, (32, 2, 1), 40_960),
]


@pytest.mark.parametrize("dtype, as_bytes, rows, tile, taken", TAKEN, ids=str)
def test_shared_memory_of_decode_attention_is_foreseen(dtype, as_bytes, rows, tile, taken):
    tile = tuning.DecodeTile(*tile, programs=1, least=64)
    assert taken <= decode_tiles.needed(tile, 256, rows, dtype, as_bytes=as_bytes) <= 1.9 * taken


@pytest.mark.parametrize("figures", [HOPPER, BLACKWELL, ADA], ids=["Hopper", "Blackwell", "Ada"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("as_bytes", [False, True])
def test_tiles_of_decode_attention_fit(figures, dtype, as_bytes, monkeypatch):
    monkeypatch.setattr(decode_tiles, "tuning_for", lambda _: figures)
    for width in (64, 80, 128, 256):
        for rows in (16, 64):
            usual = decode_tiles.tile_for(64, 8, as_bytes=as_bytes, device=torch.device("cpu"))
            tile = decode_tiles.fitting(usual, torch.zeros(1, 1, width, dtype=dtype), rows, as_bytes=as_bytes)
            assert tile is not None and tile.keys >= 16 and tile.least % tile.keys == 0
            need = decode_tiles.needed(tile, decode_tiles.widened(width), rows, dtype, as_bytes=as_bytes)
            assert need <= figures.shared_memory
            if width <= 128 and dtype == torch.bfloat16:
                assert tile == usual
    huge = torch.zeros(1, 1, 4096, dtype=torch.float32)
    assert decode_tiles.fitting(usual, huge, 64, as_bytes=as_bytes) is None


def test_every_activation_has_a_kernel():
    assert list(ACTIVATIONS) == list(activation.ACTIVATIONS)


BLOCK, MX, DELAYED = (FP8TrainingConfig.from_recipe(name).recipe for name in ("block", "mx", "delayed"))
X = torch.randn(256, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
STATE = new_states(device="cpu")


def launch_with(monkeypatch, module, part, field, tile, name=None):
    """Have `module` take this tile for a field of `tuning.py`, or for one of its entries."""
    part_tiles = getattr(HOPPER, part)
    value = tile if name is None else {**getattr(part_tiles, field), name: tile}
    figures = HOPPER._replace(**{part: part_tiles._replace(**{field: value})})
    monkeypatch.setattr(module, "tuning_for", lambda _: figures)
    monkeypatch.setattr(module, "_LAUNCHES", LaunchCache())


@pytest.mark.parametrize(
    "field, name, size, recipe, layout, needed",
    [
        ("rows", None, (32, 64), BLOCK.x, "rows", "a block of 1×128; it needs 128 columns"),
        ("rows", None, (32, 16), MX.x, "rows", "blocks of 1×32; its columns must be a multiple of 32"),
        ("rows", None, (256, 128), BLOCK.x, "rows", "matrices of a group begin at multiples of 128 rows"),
        ("rows_and_amax", None, (16, 256), replace(BLOCK.x, columns="channel"), "both", "needs 128 columns"),
        ("columns", None, (64, 64), BLOCK.x, "columns", "a block of 1×128; it needs 128 rows"),
        ("mx_columns", None, (16, 64), MX.x, "columns", "its rows must be a multiple of 32"),
        ("whole_columns", "block", (256, 64), BLOCK.x, "columns", "a block of 1×128; it needs 128 rows"),
        ("block128", None, (256, 64), BLOCK.w, "rows", "a block of 128×128 consists of whole tiles"),
        ("block128_columns", None, (64, 256), BLOCK.w, "columns", "both must divide 128"),
    ],
)
def test_a_tile_that_does_not_fit_its_block_is_refused(field, name, size, recipe, layout, needed, monkeypatch):
    tile = HOPPER.quantize.rows._replace(rows=size[0], columns=size[1])
    launch_with(monkeypatch, quantize, "quantize", field, tile, name)
    where = f"quantize.{field}" if name is None else f"quantize.{field}['{name}']"
    whole = name is not None
    with pytest.raises(ValueError) as caught:
        quantize.quantize_group([X], STATE.clone(), recipe, record=not whole and layout != "rows", layout=layout)
    message = str(caught.value)
    assert message.startswith(f"{where}: a tile of {size[0]}×{size[1]}") and needed in message, message


@pytest.mark.parametrize("size", [(64, 64), (32, 128), (128, 32)])
def test_other_tiles_decide_the_time_alone(size, monkeypatch):
    expected = quantize.quantize_operand(X, STATE.clone(), BLOCK.w, layout="both")
    tile = HOPPER.quantize.block128._replace(rows=size[0], columns=size[1])
    launch_with(monkeypatch, quantize, "quantize", "block128_both", tile)
    for one, other in zip(quantize.quantize_operand(X, STATE.clone(), BLOCK.w, layout="both"), expected, strict=True):
        assert torch.equal(one.data.view(torch.uint8), other.data.view(torch.uint8))
        assert torch.equal(one.scale, other.scale)


@pytest.mark.parametrize(
    "field, name, size, needed",
    [
        ("rows", "block", (32, 64), "it needs 128 columns"),
        ("backward_rows", None, (16, 64), "it needs 128 columns"),
        ("whole_columns", "block", (64, 32), "it needs 128 rows"),
    ],
)
def test_tiles_of_the_gated_kernels_are_refused(field, name, size, needed, monkeypatch):
    tile = HOPPER.gated.backward_rows._replace(rows=size[0], columns=size[1])
    launch_with(monkeypatch, blocks, "gated", field, tile, name)
    with pytest.raises(ValueError, match=f"^gated.{field}.*{size[0]}×{size[1]}.*{needed}"):
        if field == "rows":
            blocks.gated_quantize(X, STATE.clone(), BLOCK.x, "silu", record=True)
        else:
            blocks.gated_quantize_backward(X[:, :128].clone(), X, STATE.clone(), BLOCK.g, BLOCK.x, "silu")


def saved():
    return Quantized(torch.zeros(256, 256, dtype=torch.float8_e4m3fn), torch.full((256, 2), 127, dtype=torch.uint8))


def test_tiles_of_saved_activations_are_refused(monkeypatch):
    narrow, wide = (HOPPER.gated.forward._replace(columns=columns) for columns in (64, 256))
    dh, one = X[:, :128].contiguous(), torch.ones(())
    launch_with(monkeypatch, gated, "gated", "forward", narrow)
    with pytest.raises(ValueError, match=r"gated.forward: a tile of 16×64.*1×128"):
        gated.gated_quantize(X, STATE.clone(), DELAYED.x, "silu", record=True, into=saved())
    launch_with(monkeypatch, gated, "gated", "backward", wide)
    with pytest.raises(ValueError, match=r"gated.backward: a tile of 16×256.*1×128"):
        scale = saved().scale
        gated.gated_quantize_backward(
            dh, saved().data, one, STATE.clone(), DELAYED.g, DELAYED.x, "silu", saved_scale=scale
        )
    launch_with(monkeypatch, low_rank, "gated", "low_rank", narrow)
    with pytest.raises(ValueError, match=r"gated.low_rank: a tile of 16×64.*1×128"):
        low_rank.gated(X, None, None, "silu", saved())
    launch_with(monkeypatch, low_rank, "gated", "low_rank_backward", wide)
    with pytest.raises(ValueError, match=r"gated.low_rank_backward: a tile of 16×256.*1×128"):
        low_rank.gated_backward(dh, saved(), None, "silu", factor=None, h=False)
    x = quantize_spec(X, granularity="block")
    launch_with(monkeypatch, dequantize, "quantize", "dequantize", narrow)
    with pytest.raises(ValueError, match=r"quantize.dequantize: a tile of 16×64"):
        dequantize.dequantize(x, torch.bfloat16)
    launch_with(monkeypatch, gradients, "adapters", "down", wide)
    with pytest.raises(ValueError, match=r"adapters.down: a tile of 16×256.*1×128"):
        gradients.add_down(X[:, :16].contiguous(), x, torch.zeros(16, 256), torch.bfloat16)


def test_a_granularity_without_a_mode_is_refused(monkeypatch):
    """The specification has it as soon as the table does; kernels only with a mode of their own."""
    monkeypatch.setitem(GRANULARITIES, "half", Granularity(1, 64))
    for recipe in (replace(BLOCK.x, granularity="half"), replace(BLOCK.x, columns="half")):
        assert not quantize.can_quantize([X], recipe)
        assert not gated.can_quantize(X, recipe)
        assert not blocks.can_quantize(X, recipe) and not blocks.can_quantize_backward(X, recipe, recipe)
    monkeypatch.setattr(trust, "RECIPES", ["half"])
    config = FP8TrainingConfig.from_recipe("block")
    object.__setattr__(config, "granularity", "half")
    monkeypatch.setattr(trust.FP8TrainingConfig, "from_recipe", lambda _: config)
    monkeypatch.setattr(trust, "_wrong_gated", lambda _: [])
    assert trust._wrong_kernels(torch.device("cpu")) == []
