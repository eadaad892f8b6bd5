"""A tiny model with adapters over FP8, an engine of a few lines, and a task that it can learn."""

import torch
from decoder_cases import build
from trainer_cases import BYTES, byte_tokenizer

from octavo import FastLanguageModel
from octavo.rl.completions import Completion
from octavo.rl.rewards import Rewards
from octavo.rl.tasks import Task

REWARDS = """
def share(completions, **_):
    return [sum(c in "abcdefgh" for c in text) / max(len(text), 1) for text in completions]
"""


def adapted(folder, *, dtype=torch.float32, recipe="channel", products=False, rank=4, lora_dropout=0.0, **changes):
    """LoRA over a Llama on bytes, frozen in FP8."""
    build(vocab_size=BYTES, eos_token_id=1, **changes).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    model, tokenizer = FastLanguageModel.from_pretrained(
        str(folder), load_in_fp8=recipe, fp8_products=products, dtype=dtype
    )
    options = {"r": rank, "lora_dropout": lora_dropout, "use_gradient_checkpointing": False}
    return FastLanguageModel.get_peft_model(model, **options), tokenizer


class PlainEngine:
    """Completes prompts by whole forwards, token by token: slow, and right by construction."""

    name = "plain"
    max_length = None

    def __init__(self, model):
        self.model = model

    @torch.no_grad()
    def generate(self, prompts, n, sampling):
        generator = torch.Generator().manual_seed(sampling.seed)
        stops = {1} if sampling.stop_ids is None else set(sampling.stop_ids)
        made = []
        for i, prompt in enumerate(prompts):
            rows = torch.tensor([list(prompt)] * n)
            tokens, logprobs = [[] for _ in range(n)], [[] for _ in range(n)]
            for _ in range(sampling.max_new_tokens):
                logits = self.model(input_ids=rows, use_cache=False).logits[:, -1].float() / sampling.temperature
                table = logits.log_softmax(-1)
                drawn = torch.multinomial(table.exp(), 1, generator=generator)
                rows = torch.cat([rows, drawn], dim=1)
                for slot, token in enumerate(drawn[:, 0].tolist()):
                    if not tokens[slot] or tokens[slot][-1] not in stops:
                        tokens[slot].append(token)
                        logprobs[slot].append(float(table[slot, token]))
            made += [Completion(i, t, p, t[-1] in stops) for t, p in zip(tokens, logprobs, strict=True)]
        return made

    def standby(self):
        pass

    wake = standby

    def statistics(self):
        return {}


def vowels(completions, **_):
    """The share of bytes below 97 + 8: easy to move."""
    return [sum(c in "abcdefgh" for c in text) / max(len(text), 1) for text in completions]


def vowel_task(functions=(vowels,), prompts=6):
    return Task("vowels", [{"prompt": f"say {i}:", "answer": str(i)} for i in range(prompts)], Rewards(functions))
