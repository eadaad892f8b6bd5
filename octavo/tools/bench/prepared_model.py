"""A model prepared for one contender, and the training step that is timed.

Weights are random and come from the seed alone, so that every contender has the same ones, and so that they need no
copy: between its turns a contender frees the memory of its weights and draws them again when its turn comes. (Eight
billion of them are drawn in a fraction of a second on the GPU; copying them to the CPU and back takes several.) A base
frozen in FP8 stays between turns: it would have to be quantised again.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.convert import convert_to_fp8
from octavo.decoders import graphs
from octavo.decoders.fuse import fuse_loaded, padded_calls
from octavo.nn.frozen import FP8FrozenLinear, activation_config
from octavo.numerics import FP8ScalingManager, FP8TrainingConfig
from octavo.optim import build_optimizer, offload_master, offload_states, step_in_backward
from octavo.tools.bench.contenders import FROZEN, OURS, Contender
from octavo.tools.bench.others import convert_by_te, convert_by_torchao
from octavo.tools.bench.random_model import decoder_layers
from octavo.tools.bench.workload import Workload, make_batches
from octavo.tools.shapes import Case

INIT_STD = 0.02
LEARNING_RATE = 1e-5


class PreparedModel:
    """Model of a contender. `step()` runs forward, loss, backward and, in FP8, the roll of the scaling histories.

    For a whole step the optimiser follows. Its states are freed between turns with the gradients, and created again in
    the next turn's first step, which is not timed.
    """

    def __init__(
        self, case: Case, contender: Contender, layers: int | None = None, workload: Workload | None = None
    ) -> None:
        self._workload = workload
        self._without_padding = workload is not None and contender.kind in OURS
        self.case = replace(case, layers=case.layers if layers is None else layers)
        self.model: Any = self.case.family.build(self.case)
        self._storages: list[tuple[torch.UntypedStorage, int]] = []
        self._drawn = self._matrices()
        self._draw()
        self.scaling: FP8ScalingManager | None = None
        self.context: AbstractContextManager[Any] = nullcontext()
        self.summary = "BF16, nothing converted"
        self._prepare(contender)
        self._entry: Tensor | None = None
        if case.frozen:
            self.model.requires_grad_(False)
            if case.rank:
                self._adapt(contender)
            else:
                self._enter()
        if contender.compile:
            self._compile()
        self._graphs = contender.graphs
        self._use_graphs(True)
        self._optimizer = self._build_optimizer(contender) if contender.optimizer else None
        self.inputs = self._first_inputs()

    def _first_inputs(self) -> dict[str, Tensor]:
        if self._workload is not None:
            return make_batches(self.case, self._workload, 1)[0].to(self.case.device)
        generator = torch.Generator().manual_seed(self.case.seed)
        shape = (self.case.tokens // self.case.seq, self.case.seq)
        tokens = torch.randint(self.case.vocabulary, shape, generator=generator).to(self.case.device)
        return {"input_ids": tokens, "labels": tokens}

    def _prepare(self, contender: Contender) -> None:
        kind, tokens = contender.kind, self.case.tokens
        if kind == "octavo" and self.case.frozen:
            self._drawn = []  # drops the BF16 weights, which would stay beside the FP8 ones
            self.summary = "; ".join(self._freeze(contender))
        elif kind in ("torchao", "torchao-row"):
            self.summary = convert_by_torchao(self.model, kind, any_length=self._workload is not None)
        elif kind == "peft":
            self.summary = "BF16, adapters in FP32, as PEFT makes them"
        elif kind == "te":
            self.summary, self.context = convert_by_te(self.model)
        elif kind == "octavo-bf16":
            self.summary = convert_to_fp8(self.model, precision="bf16", tokens=tokens).summary()
        elif kind in ("octavo", "octavo-fused"):
            converted = self.case.family.convert(self.model, kind, config_of(contender), tokens)
            self.context, self.scaling, self.summary = converted

    def _build_optimizer(self, contender: Contender) -> torch.optim.Optimizer:
        """Build the optimiser; BF16 weights are rounded stochastically in Octavo's, as usual in others."""
        trained = [p for p in self.model.parameters() if p.requires_grad]
        ours = contender.kind in OURS
        optimizer = build_optimizer(str(contender.optimizer), trained, LEARNING_RATE, stochastic_rounding=ours)
        if contender.offload == "master":
            offload_master(self.model, optimizer)
            self._drawn = []  # the remaining weights are in FP8, and stay between turns
        elif contender.in_backward:
            step_in_backward(optimizer, offload=contender.offload is not None)
        elif contender.offload is not None:
            offload_states(optimizer)
        return optimizer

    def _freeze(self, contender: Contender) -> list[str]:
        """Quantise each weight in turn and fuse, as `FastLanguageModel` does when it loads a model."""
        granularity = FROZEN[str(contender.recipe)]
        config = activation_config(granularity).replace(fp8_head=contender.fp8_head)
        self.scaling = FP8ScalingManager.from_config(config)
        for name, linear in list(self.model.named_modules()):
            if type(linear) is nn.Linear and name != "lm_head":
                frozen = FP8FrozenLinear.from_linear(linear, granularity, config, scaling=self.scaling, name=name)
                frozen.fp8_products = not contender.weights_only
                self.model.set_submodule(name, frozen)
        self.scaling.to(self.case.device)
        from octavo.hf import lora

        lora.install()
        return fuse_loaded(self.model).fused

    def _adapt(self, contender: Contender) -> None:
        """Add adapters to the targets, with non-zero B, so that every gradient is informative.

        They are in BF16, but for `peft`, where they are as PEFT makes them.
        """
        options = {"r": self.case.rank, "lora_alpha": self.case.rank, "target_modules": self.case.target_modules}
        options["autocast_adapter_dtype"] = contender.kind == "peft"
        from octavo.hf.lora import add_adapters

        self.model = add_adapters(self.model, checkpointing=False, seed=self.case.seed, options=options)
        generator = torch.Generator(self.case.device).manual_seed(self.case.seed)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                dtype = torch.float32 if contender.kind == "peft" else torch.bfloat16
                values = torch.empty_like(parameter.data, dtype=torch.bfloat16)
                parameter.data = values.normal_(0.0, INIT_STD, generator=generator).to(dtype)

    def _enter(self) -> None:
        """Keep the gradient of the embedding's output, where backward ends if nothing is trained."""
        self.model.enable_input_require_grads()

        def save_output(_module: nn.Module, _inputs: Any, output: Tensor) -> None:
            self._entry = output

        self.model.get_input_embeddings().register_forward_hook(save_output)

    def _compile(self) -> None:
        if not self.case.family.compiles_layers:
            self.model.compile(fullgraph=True)
            return
        # Ours as `convert_to_fp8(..., compile="layers")` does: the second length makes the code dynamic.
        changing = self._workload is not None and self._workload.lengths != "full"
        dynamic = True if changing and not self._without_padding else None
        for layer in decoder_layers(self._plain):
            layer.compile(dynamic=dynamic)
        if self._workload is not None:
            self.summary += "; layers compiled" + (" with dynamic=True" if dynamic else "")

    @property
    def _plain(self) -> Any:
        """The transformers model inside PEFT's wrapper."""
        return self.model.get_base_model() if self.case.rank else self.model

    def step(self, inputs: dict[str, Tensor] | None = None) -> Tensor:
        """Run one training step, on `self.inputs` by default; return the loss, still on the device."""
        with self.context:
            loss = self.case.family.loss(self.model, self.inputs if inputs is None else inputs)
        loss.backward()
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        if self.scaling is not None:
            self.scaling.step()  # a no-op after an optimiser that it follows
        return loss.detach()

    @property
    def padded_calls(self) -> dict[str, int]:
        """How many calls computed padding though the decoder is ours, by the reason."""
        return dict(padded_calls(self.model))

    @property
    def reserved_bytes(self) -> int:
        """Memory in use that torch does not count as allocated."""
        return graphs.reserved_bytes(self.model) if self._graphs else 0

    def _use_graphs(self, enabled: bool) -> None:
        if self._graphs:
            graphs.use_cuda_graphs(self.model, enabled, after=1)

    @property
    def untimed_steps(self) -> int:
        """Steps to run after `unpark`: one gets its memory back from the driver; with graphs, a second one records."""
        return 2 if self._graphs else 1

    def check_recorded(self) -> None:
        if self._graphs and not graphs.recordings(self.model):
            raise RuntimeError("no CUDA graph was recorded")

    def warm_layers(self) -> None:
        """Compile the decoder layers at the real shapes, without the head, whose logits take 17 GB at 8B.

        All workers do this at the same time, so that their compilations overlap. (A model that is compiled as a
        whole is another graph at another depth: nothing to prepare.) The gradient that comes in is not the
        loss's, so scaling histories are spoiled: a prepared model is of no use after it.
        """
        if self._without_padding:  # known only where the loss is asked for, too; it comes in chunks
            self.step()
        elif self.case.family.compiles_layers:
            with self.context:
                inputs = {name: x for name, x in self.inputs.items() if name != "labels"}
                hidden = self._plain.base_model(**inputs, use_cache=False).last_hidden_state
            hidden.float().square().mean().backward()

    def gradients(self) -> dict[str, Tensor | None]:
        """Return the gradients that a step has left, for comparison."""
        if self.case.frozen and not self.case.rank:
            return {"embedding's output": None if self._entry is None else self._entry.grad}
        return {name: p.grad for name, p in self.model.named_parameters() if p.requires_grad}

    def forget_gradients(self) -> None:
        self._entry = None
        self.model.zero_grad(set_to_none=True)

    def park(self) -> None:
        """Free gradients, states, recordings, and weights that can be drawn again."""
        self._use_graphs(False)
        if self._optimizer is not None:
            self._optimizer.state.clear()
        self._free(self._drawn)

    def unpark(self) -> None:
        for storage, size in self._storages:
            storage.resize_(size)
        self._draw()
        self._use_graphs(True)

    def drop(self) -> None:
        """Free all memory for good, except the compiled code, which belongs to the model."""
        self._free(self._matrices())

    def _free(self, weights: list[nn.Parameter]) -> None:
        self.forget_gradients()
        self._storages = []
        for storage in (weight.untyped_storage() for weight in weights):
            if storage.nbytes():  # frozen weights of a group share a storage
                self._storages.append((storage, storage.nbytes()))
                storage.resize_(0)
        if self.case.device == "cuda":
            torch.cuda.empty_cache()

    def _matrices(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.dim() >= 2]

    def _draw(self) -> None:
        """Draw every matrix from the seed. Norms and biases keep their initial values."""
        generator = torch.Generator(self.case.device).manual_seed(self.case.seed)
        for parameter in self._drawn:
            parameter.data.normal_(0.0, INIT_STD, generator=generator)


def config_of(contender: Contender) -> FP8TrainingConfig:
    """Return the FP8 configuration of a contender; everything not chosen is the library's default."""
    overrides: dict[str, Any] = {"fp8_head": True} if contender.fp8_head else {}
    overrides |= {"wgrad": contender.wgrad} if contender.wgrad else {}
    overrides |= {"activations": contender.activations} if contender.activations != "bf16" else {}
    return FP8TrainingConfig.from_recipe(str(contender.recipe), **overrides)
