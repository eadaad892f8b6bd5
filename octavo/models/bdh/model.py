"""BDH ("Dragon Hatchling"): a language model of bytes made of four matrices and an embedding, shared by every layer.

There is no `nn.Linear` in it: weights are raw parameters used with `@`, from the right, batched per head. That makes it
the model on which Octavo's autocast is shown: nothing here knows about FP8.

One layer, with `ln` a layer norm without weights, x starting as `ln(embedding[tokens])`:

    s = relu(x @ encoder)                         which neurons fire, per head: sparse and positive
    a = tril(rope(s) @ rope(s)ᵀ, -1) @ x          causal attention: a position sees those strictly before it
    t = relu(ln(a) @ encoder_v)                   which neurons the context excites
    z = dropout(s * t), heads side by side        a neuron counts when both agree
    x = ln(x + ln(z @ decoder))

    logits = x @ lm_head

The scores are neither scaled nor passed through a softmax (this is linear attention); `ln(a)` takes the scale out. The
first position attends to nothing: a = 0 there, so t = 0 and the layer leaves its x unchanged. The embedding is
normalised before the first layer so that every layer, the first included, sees an x of unit variance; without it a
fresh model's first scores (about 1e-5) drown in the epsilon of `ln(a)`.

RoPE rotates the neurons (2i, 2i+1) of position p by the angle p · theta^(-2i/N), in FP32 whatever the dtype of s.

Shapes: B batch, T positions, D width, H heads, N neurons per head, V vocabulary (256: the bytes).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PRESETS: dict[str, dict[str, int]] = {
    "tiny": {"dim": 128, "heads": 4, "neurons": 1024, "layers": 4},  # 1.6 M parameters: minutes on a CPU
    "25m": {"dim": 256, "heads": 4, "neurons": 8192, "layers": 6},
    "100m": {"dim": 512, "heads": 4, "neurons": 16384, "layers": 6},
}

INIT_STD = 0.02
ROPE_THETA = 2.0**16


@dataclass(frozen=True)
class BDHConfig:
    """The shape of a BDH model. `neurons` is N, the number per head; `layers` adds compute but no parameters."""

    dim: int = 256
    heads: int = 4
    neurons: int = 8192
    layers: int = 6
    vocabulary: int = 256
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for field in ("dim", "heads", "neurons", "layers", "vocabulary"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"BDHConfig.{field}={value!r}: must be a whole number, 1 or more")
        if self.neurons % 2:
            raise ValueError(f"BDHConfig.neurons={self.neurons}: must be even, because RoPE rotates neurons in pairs")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"BDHConfig.dropout={self.dropout!r}: must be at least 0 and less than 1")

    @classmethod
    def preset(cls, name: str, dropout: float = 0.0) -> "BDHConfig":
        """Return the shape of that name: `tiny`, `25m` or `100m`."""
        if name not in PRESETS:
            raise ValueError(f"BDH size {name!r}: choose from {', '.join(PRESETS)}")
        return cls(**PRESETS[name], dropout=dropout)

    @property
    def parameter_count(self) -> int:
        """The number of trained values."""
        return 3 * self.heads * self.dim * self.neurons + 2 * self.vocabulary * self.dim


class BDH(nn.Module):
    """The BDH model. `model(tokens)` returns `(logits, None)`; `model(tokens, targets)` returns `(logits, loss)`."""

    def __init__(self, config: BDHConfig) -> None:
        super().__init__()
        self.config = config
        D, H, N, V = config.dim, config.heads, config.neurons, config.vocabulary
        self.embedding = nn.Parameter(torch.empty(V, D))
        self.encoder = nn.Parameter(torch.empty(H, D, N))
        self.encoder_v = nn.Parameter(torch.empty(H, D, N))
        self.decoder = nn.Parameter(torch.empty(H * N, D))
        self.lm_head = nn.Parameter(torch.empty(D, V))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=INIT_STD)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        config = self.config
        cos_TN, sin_TN = rope_angles(tokens.shape[1], config.neurons, tokens.device)
        x_B1TD = self.norm(F.embedding(tokens, self.embedding)).unsqueeze(1)

        for _ in range(config.layers):
            s_BHTN = F.relu(x_B1TD @ self.encoder)
            q_BHTN = rope(s_BHTN, cos_TN, sin_TN)
            a_BHTD = (q_BHTN @ q_BHTN.mT).tril(-1) @ x_B1TD
            t_BHTN = F.relu(self.norm(a_BHTD) @ self.encoder_v)
            z_BHTN = F.dropout(s_BHTN * t_BHTN, config.dropout, self.training)
            z_B1TK = z_BHTN.transpose(1, 2).flatten(2).unsqueeze(1)  # K = H·N, the heads side by side
            x_B1TD = self.norm(x_B1TD + self.norm(z_B1TK @ self.decoder))

        logits_BTV = x_B1TD.squeeze(1) @ self.lm_head
        if targets is None:
            return logits_BTV, None
        # In FP32: rounding a loss near 2.3 to BF16 moves it by up to 0.008, as much as the effects we want to see.
        return logits_BTV, F.cross_entropy(logits_BTV.float().flatten(0, 1), targets.flatten())

    def norm(self, x: Tensor) -> Tensor:
        """Layer norm without weights."""
        return F.layer_norm(x, (self.config.dim,))

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        context: int | None = None,
    ) -> Tensor:
        """Return `tokens` [B, T] followed by `max_new_tokens` sampled ones.

        `temperature=0` takes the likeliest byte; `top_k` samples among the k likeliest. `context` limits how far back
        the model looks (it has no limit of its own, but was trained on sequences of one length). Every new byte
        recomputes the whole window: fine for a sample, not meant for serving. Dropout is off in either mode.
        """
        if tokens.ndim != 2 or tokens.shape[1] == 0:
            raise ValueError(f"generate: tokens has shape {tuple(tokens.shape)}; it must be [batch, at least one byte]")
        if temperature < 0:
            raise ValueError(f"generate: temperature={temperature}: must be 0 (greedy) or more")
        if top_k is not None and not 1 <= top_k <= self.config.vocabulary:
            raise ValueError(f"generate: top_k={top_k}: must be from 1 to {self.config.vocabulary}, or None")
        if context is not None and context < 1:
            raise ValueError(f"generate: context={context}: must be 1 or more, or None")

        was_training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                window = tokens if context is None else tokens[:, -context:]
                logits_BV = self(window)[0][:, -1].float()
                tokens = torch.cat((tokens, choose(logits_BV, temperature, top_k, generator)), dim=1)
        finally:
            self.train(was_training)
        return tokens


def choose(logits_BV: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """Sample one token per sequence, [B, 1]. Refuses non-finite logits: sampling from them kills a CUDA context."""
    if not bool(logits_BV.isfinite().all()):
        raise FloatingPointError("generate: the model's logits are not finite: it has diverged")
    if temperature == 0:
        return logits_BV.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        smallest = logits_BV.topk(top_k, dim=-1).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < smallest, float("-inf"))
    probabilities = F.softmax(logits_BV / temperature, dim=-1)
    return torch.multinomial(probabilities, num_samples=1, generator=generator)


def rope_angles(length: int, neurons: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosine and sine for each position and pair of neurons, [T, N/2] each, in FP32.

    They are recomputed in every forward, which costs little.
    """
    pair = torch.arange(0, neurons, 2, device=device, dtype=torch.float32)
    position = torch.arange(length, device=device, dtype=torch.float32)
    angle = position[:, None] * ROPE_THETA ** (-pair / neurons)
    return angle.cos(), angle.sin()


def rope(s: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the neighbouring pairs of the last dimension; computed in FP32, returned in the dtype of `s`."""
    even, odd = s[..., 0::2], s[..., 1::2]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(s.dtype)
