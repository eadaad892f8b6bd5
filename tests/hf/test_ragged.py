"""Padded and packed batches: layers compute real tokens alone, and losses and gradients are those of each sequence."""

import copy
import functools
import gc
import weakref

import pytest
import torch
import transformers
from decoder_cases import build, run
from peft import LoraConfig, get_peft_model
from torch import nn
from trl.trainer.utils import add_fused_lm_head

from octavo import FastLanguageModel, FP8TrainingConfig, convert_to_fp8
from octavo.decoders import backbone, forwards, ragged

FAMILIES = {
    "Llama": {},
    "Qwen3": {},
    "Qwen2": {},
    "Mistral": {"sliding_window": 5},
    "Gemma": {},
    "Gemma2": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "Gemma3": {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
}
LENGTHS = (13, 1, 21, 6)
every_family = pytest.mark.parametrize("family", [name for name in FAMILIES if name != "Gemma2"])  # see CALLS


def both(family="Llama", **changes):
    """A model in high precision and its fused twin, which differ by rounding alone."""
    changes = FAMILIES[family] | changes
    models = build(family, **changes).float(), build(family, **changes).float()
    convert_to_fp8(models[1], precision="bf16")
    return models


def sequences(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(1, 160, (length,), generator=generator) for length in lengths]


def padded(parts, side="right", length=None):
    length = length or max(map(len, parts))
    ids, mask, labels = (torch.full((len(parts), length), fill) for fill in (0, 0, -100))
    for row, part in enumerate(parts):
        place = slice(0, len(part)) if side == "right" else slice(length - len(part), length)
        ids[row, place], mask[row, place], labels[row, place] = part, 1, part
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def packed(parts):
    ids = torch.cat(parts)[None]
    positions = torch.cat([torch.arange(len(part)) for part in parts])[None]
    return {"input_ids": ids, "position_ids": positions, "labels": ids.where(positions > 0, -100)}


def one_by_one(model, parts):
    """The loss and all gradients, over all tokens, from calls with one sequence each."""
    model.zero_grad()
    count = sum(len(part) - 1 for part in parts)
    total = 0.0
    for part in parts:
        if len(part) > 1:
            loss = model(input_ids=part[None], labels=part[None]).loss * (len(part) - 1) / count
            loss.backward()
            total += loss.detach()
    return total, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(actual, expected, tolerance=2e-5):
    (loss, gradients), (expected_loss, expected_gradients) = actual, expected
    assert abs(loss - expected_loss) <= 1e-5 * abs(expected_loss)
    for name, gradient in expected_gradients.items():
        assert (gradients[name] - gradient).norm() <= tolerance * gradient.norm() + 1e-9, name


@pytest.fixture
def shapes(monkeypatch):
    """The shapes that MLPs were given."""
    seen = []
    original = forwards.mlp_forward

    def mlp_forward(self, mlp, x):
        seen.append(tuple(x.shape[:-1]))
        return original(self, mlp, x)

    monkeypatch.setattr("octavo.decoders.fuse.mlp_forward", mlp_forward)
    return seen


@every_family
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_changes_nothing(family, side):
    reference, model = both(family)
    expected = one_by_one(reference, sequences())
    assert_same(run(model, **padded(sequences(), side)), expected)
    assert model.octavo_report.padded == {}


@every_family
def test_packed_rows_do_not_see_each_other(family):
    """`config.use_cache` is true, as it is by default: transformers alone takes such a row for one sequence."""
    reference, model = both(family)
    assert model.config.use_cache
    expected = one_by_one(reference, sequences())
    assert_same(run(model, **packed(sequences())), expected)
    leak = run(reference, **packed(sequences()))[0]
    assert abs(leak - expected[0]) > 1e-3 * expected[0]


def test_layers_see_real_tokens_alone(shapes):
    """41 tokens in a batch of 84, rounded up to 64 rows."""
    model = build()
    convert_to_fp8(model, FP8TrainingConfig.from_recipe("channel"))
    run(model, **padded(sequences()))
    assert shapes == [(1, 64)] * 2
    shapes.clear()
    run(model, **padded(sequences((21, 21))))  # nothing is padded: as it comes
    assert shapes == [(2, 21)] * 2


@pytest.mark.parametrize(("tokens", "rows"), [(1, 64), (64, 64), (65, 128), (2000, 2048), (4097, 4352), (8191, 8192)])
def test_few_numbers_of_rows(tokens, rows):
    mask = torch.zeros(2, 9000, dtype=torch.int64)
    mask[1, :tokens] = 1
    actual = ragged.layout_of((2, 9000), mask, None, None, torch.full((2, 9000), -100), torch.device("cpu")).ragged
    assert actual.rows == rows and len(actual.index) == tokens and actual.offsets[-1] == rows


@pytest.mark.parametrize("recipe", ["delayed", "channel", "block", "mx"])
def test_rows_at_the_end_change_no_scale(recipe):
    """In FP8, a batch with padding has the very bits of the same tokens packed: neither padding nor filling counts."""
    results = []
    for inputs in (padded(sequences()), padded(sequences(), length=40), packed(sequences())):
        model = build()
        convert_to_fp8(model, FP8TrainingConfig.from_recipe(recipe))
        loss, gradients = run(model, **inputs)
        state = torch.cat([s.flatten() for s in model.octavo_report.scaling.states])
        results.append((loss, gradients, state))
    for loss, gradients, state in results[1:]:
        assert torch.equal(loss, results[0][0]) and torch.equal(state, results[0][2])
        assert all(torch.equal(gradients[name], g) for name, g in results[0][1].items())


def test_a_row_of_padding_and_packed_rows_with_padding():
    reference, model = both()
    expected = one_by_one(reference, sequences())
    empty = padded([*sequences(), torch.zeros(0, dtype=torch.int64)])
    assert_same(run(model, **empty), expected)
    inputs = packed(sequences())
    inputs = {name: nn.functional.pad(x, (0, 7), value=-100 if name == "labels" else 0) for name, x in inputs.items()}
    mask = torch.ones_like(inputs["input_ids"])
    mask[:, -7:] = 0
    assert_same(run(model, **inputs, attention_mask=mask), expected)
    assert model.octavo_report.padded == {}


def test_a_mask_by_position():
    reference, model = both()
    inputs = padded(sequences(), "left")
    args = inputs.pop("input_ids"), inputs.pop("attention_mask")
    torch.testing.assert_close(model(*args, **inputs).loss, one_by_one(reference, sequences())[0])
    assert model.octavo_report.padded == {}


def test_offsets_tell_sequences_apart():
    """Collators for flash attention give offsets instead of positions."""
    reference, model = both()
    inputs = packed(sequences())
    del inputs["position_ids"]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 21, "max_length_k": 21}
    assert_same(run(model, **inputs, **given), one_by_one(reference, sequences()), tolerance=1e-4)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing(reentrant):
    reference, model = both()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(run(model, **padded(sequences())), one_by_one(reference, sequences()))
    assert model.octavo_report.padded == {}


def test_embeddings_instead_of_tokens():
    reference, model = both()
    inputs = padded(sequences())
    embeddings = model.get_input_embeddings()(inputs.pop("input_ids")).detach()
    loss, gradients = run(model, inputs_embeds=embeddings, **inputs)
    expected_loss, expected = one_by_one(reference, sequences())
    del expected["model.embed_tokens.weight"]
    assert_same((loss, gradients), (expected_loss, expected))


@pytest.mark.parametrize("in_fp8", [True, False])
def test_adapters(in_fp8, tmp_path):
    """LoRA on a base in FP8 and on one in high precision: gradients as from one sequence at a time."""
    build().save_pretrained(tmp_path)
    options = {"fp8_products": False} if in_fp8 else {}
    model, _ = FastLanguageModel.from_pretrained(
        str(tmp_path), load_in_fp8=in_fp8, dtype=torch.float32, tokenizer=False, **options
    )
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)).train()
    expected = one_by_one(model, sequences())
    assert_same(run(model, **padded(sequences(), "left")), expected, tolerance=1e-4)
    assert_same(run(model, **packed(sequences())), expected, tolerance=1e-4)


def test_calls_that_need_padding_have_it_and_are_counted(shapes):
    reference, model = both()
    inputs = padded(sequences())
    shapes.clear()
    for change, reason in (
        ({"output_hidden_states": True}, "hidden states or attentions are asked for"),
        ({"use_cache": True}, "a cache is asked for"),
        ({"labels": inputs["input_ids"]}, "padding has labels other than -100"),
    ):
        expected = reference(**inputs | change)
        actual = model(**inputs | change)
        torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-5, atol=1e-5)
        assert (actual.hidden_states is None) == (expected.hidden_states is None)
        assert any(reason in line and "1 calls" in line for line in model.octavo_report.to_dict()["fused"])
    holes = inputs["attention_mask"].clone()
    holes[2, 3] = 0
    labels = inputs["labels"].masked_fill(holes == 0, -100)
    change = {"attention_mask": holes, "labels": labels}
    torch.testing.assert_close(model(**inputs | change).loss, reference(**inputs | change).loss, rtol=1e-5, atol=1e-5)
    assert sum(model.octavo_report.padded.values()) == 4
    handle = model.model.layers[0].register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape)))
    run(model, **inputs)
    handle.remove()
    assert shapes[-1][:2] == (4, 21)


def test_evaluation_tells_packed_rows_apart():
    """Logits are asked for, and `config.use_cache` is true."""
    reference, model = both()
    expected = one_by_one(reference, sequences())[0]
    with torch.no_grad():
        actual = model.eval()(**packed(sequences()))
        logits = model(**{name: x for name, x in packed(sequences()).items() if name != "labels"}).logits
        ones = torch.ones_like(packed(sequences())["input_ids"])
        masked = model(**packed(sequences()), attention_mask=ones, use_cache=None)
    assert torch.equal(masked.logits, logits)
    assert abs(actual.loss - expected) < 1e-5 * expected and torch.equal(actual.logits, logits)


@pytest.mark.parametrize("inputs", [padded(sequences()), padded(sequences(), "left"), packed(sequences())])
def test_trl_gets_hidden_states_without_padding(inputs, monkeypatch):
    """Its trainers replace the model's forward, call the layers themselves, and compute the loss from their output."""
    reference, model = both()
    expected = one_by_one(reference, sequences())
    labels = inputs["labels"].clone()
    if "attention_mask" in inputs:  # the first token of a row is not trained where that is padded on the left, either
        starts = inputs["attention_mask"].diff(dim=1, prepend=torch.zeros(len(labels), 1, dtype=torch.int64)) == 1
        labels[starts] = -100
    add_fused_lm_head(model)
    seen = []
    monkeypatch.setattr(backbone, "_flat", lambda *args, flat=backbone._flat: (seen.append(1), flat(*args))[1])
    count = sum(length - 1 for length in LENGTHS)
    assert_same(run(model, **inputs | {"labels": labels}, fused_lm_head=True, num_items_in_batch=count), expected)
    assert seen == [1]
    with torch.no_grad():
        model.eval()(**inputs, fused_lm_head=True)
    assert seen == [1, 1]


def test_a_loss_of_ones_own_has_padding():
    """Nobody knows what it does with the states of padding: they are those of transformers."""
    reference, model = both()
    inputs = padded(sequences())
    del inputs["labels"]
    actual, expected = (each(**inputs).logits for each in (model, reference))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_deleted_model_is_gone_and_a_copy_has_its_own():
    _, model = both()
    copied = copy.deepcopy(model)
    add_fused_lm_head(copied)
    assert copied.model.__dict__["_octavo_causal"]() is copied
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_masks_by_kind_of_layer():
    """Some families take a dictionary, which says more than padding."""
    reference, model = both("Qwen3")
    visible = torch.ones(21, 21, dtype=torch.bool).tril()[None, None]
    inputs = {"input_ids": padded(sequences((21, 21)))["input_ids"], "attention_mask": {"full_attention": visible}}
    inputs["labels"] = inputs["input_ids"]
    torch.testing.assert_close(model(**inputs).loss, reference(**inputs).loss, rtol=1e-5, atol=1e-5)


def test_a_window_that_a_family_does_not_have():
    """transformers keeps unknown names of a configuration, and Llama does not read this one."""
    reference, model = both(sliding_window=4)
    inputs = packed(sequences((21,)))
    torch.testing.assert_close(model(**inputs).loss, reference(**inputs).loss, rtol=1e-5, atol=1e-5)


def test_scores_that_are_bent_are_left_to_the_family():
    seen = []

    def attend(_module, query, *_others, softcap=None, **_kwargs):
        seen.append(softcap)
        return torch.zeros_like(query).transpose(1, 2), None

    transformers.AttentionInterface.register("noting", attend)
    transformers.AttentionMaskInterface.register("noting", transformers.masking_utils.sdpa_mask)
    model = build("Gemma2")
    model.config._attn_implementation = "noting"
    convert_to_fp8(model)
    run(model, **padded(sequences((21, 21))))
    assert seen == [model.config.attn_logit_softcapping] * 2


def with_mask(inputs, side="right", padding=7, between=False):
    """A packed row with a mask, and with padding on one side, or after its first sequence."""
    inputs = inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}
    at = LENGTHS[0] if between else (0 if side == "left" else inputs["input_ids"].shape[1])
    rest = {name: torch.full((1, padding), -100 if name == "labels" else 0) for name in inputs}
    return {name: torch.cat([x[:, :at], rest[name], x[:, at:]], dim=1) for name, x in inputs.items()}


def by_offsets(inputs, positions=None):
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    given = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 21, "max_length_k": 21}
    return {name: x for name, x in inputs.items() if name != "position_ids"} | given | (positions or {})


PACKED = {
    "positions": packed(sequences()),
    "a mask of ones": with_mask(packed(sequences()), padding=0),
    "padding on the right": with_mask(packed(sequences())),
    "padding on the left": with_mask(packed(sequences()), "left"),
    "padding between sequences": with_mask(packed(sequences()), between=True),
    "offsets": by_offsets(packed(sequences())),
    "offsets, positions that run on": by_offsets(packed(sequences()), {"position_ids": torch.arange(41)[None]}),
}
CALLS = {
    "real tokens alone": ("Llama", {}),
    "hidden states": ("Mistral", {"output_hidden_states": True}),
    "a hook": ("Gemma3", {}),
    "softcapping of scores": ("Gemma2", {}),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("inputs", PACKED)
def test_packed_rows_are_told_apart_however_they_are_computed(inputs, call):
    """While training, while evaluating, and where layers have to see the batch as it was given."""
    family, asked = CALLS[call]
    changes = {"final_logit_softcapping": None, "attn_logit_softcapping": 4.0} if family == "Gemma2" else {}
    reference, model = both(family, **changes)
    if call == "a hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    expected = one_by_one(reference, sequences())
    assert_same(run(model, **PACKED[inputs], **asked), expected, tolerance=1e-4)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**PACKED[inputs], **asked).loss, expected[0], rtol=2e-5, atol=1e-5)


def test_positions_that_leave_numbers_out():
    """With a mask, as transformers has it, a jump forward is no new sequence, in training and in evaluation alike."""
    reference, model = both()
    inputs = padded(sequences((21, 21)))
    inputs["position_ids"] = torch.cat([torch.arange(9), torch.arange(30, 42)])[None].expand(2, -1)
    expected = reference(**inputs).loss
    torch.testing.assert_close(model(**inputs).loss, expected)
    torch.testing.assert_close(model.eval()(**inputs).loss, expected)


def test_tokens_masked_within_a_packed_sequence_stay_masked():
    inputs = with_mask(packed(sequences()), padding=0)
    inputs["attention_mask"][0, 5] = 0
    assert ragged.told_apart(inputs) == {}


def test_a_cache_that_is_asked_for_is_one_sequence_as_in_transformers():
    reference, model = both()
    inputs = packed(sequences()) | {"use_cache": True}
    torch.testing.assert_close(model(**inputs).loss, reference(**inputs).loss)


@pytest.mark.parametrize("module", ["accelerate_tools", "octavo_script", "octavo.decoders"])
def test_hooks_are_known_by_their_package(module):
    _, model = both()

    def hook(*_):
        return None

    hook.__module__ = module
    model.model.layers[0].register_forward_hook(hook)
    run(model, **padded(sequences()))
    assert bool(model.octavo_report.padded) == (module != "octavo.decoders")


def test_a_forward_of_ones_own_sees_rows_as_they_were_given():
    _, model = both()
    layer, seen = model.model.layers[0], []
    original = layer.forward

    @functools.wraps(original)
    def forward(hidden_states, *args, **kwargs):
        seen.append(tuple(hidden_states.shape[:2]))
        return original(hidden_states, *args, **kwargs)

    layer.forward = forward
    run(model, **padded(sequences()))
    assert seen == [(4, 21)]


def test_an_empty_cache_is_filled():
    model = both()[1]
    cache = transformers.DynamicCache(config=model.config)
    model(**padded(sequences((21, 21))), past_key_values=cache)
    assert cache.get_seq_length() == 21


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_count_of_items_does_not_count_first_tokens(side):
    """The Trainer counts labels of all columns but the first: with left padding, the first token of each row."""
    reference, model = both()
    inputs = padded(sequences(), side)
    count = (inputs["labels"][:, 1:] != -100).sum()
    assert_same(run(model, **inputs, num_items_in_batch=count), one_by_one(reference, sequences()))


def test_packed_rows_of_models_whose_loss_is_not_fused():
    reference, model = both("Gemma3", final_logit_softcapping=30.0)
    expected = one_by_one(reference, sequences())[0]
    for each in (model.train(), model.eval()):
        torch.testing.assert_close(each(**packed(sequences())).loss, expected)


def test_evaluation_by_offsets():
    reference, model = both()
    inputs = packed(sequences())
    del inputs["position_ids"]
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    with torch.no_grad():
        actual = model.eval()(**inputs, cu_seq_lens_q=offsets, cu_seq_lens_k=offsets).loss
    torch.testing.assert_close(actual, one_by_one(reference, sequences())[0].detach())


def test_a_model_that_is_compiled_as_a_whole():
    torch._dynamo.reset()
    reference, model = both()
    inputs = padded(sequences()) | {"use_cache": False}
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**inputs).loss, reference(**inputs).loss, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
