"""LoRA on a small base frozen in FP8, and an engine that frees weights as DeepSpeed's ZeRO-3 does."""

import weakref

import decoder_cases
import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from octavo.decoders.fuse import fuse_loaded
from octavo.hf.lora import install
from octavo.nn.frozen import FP8FrozenLinear

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Blocks of 128 rows, so that q, k and v, or gate and up, can be one product.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 1}


def adapted(granularity, family="Llama", **changes):
    """A decoder with its linears frozen in FP8, and adapters beside them that are not zero."""
    model = decoder_cases.build(family, **SIZES | changes)
    for module in list(model.modules()):
        for name in LINEARS:
            if isinstance(module._modules.get(name), nn.Linear):
                setattr(module, name, FP8FrozenLinear.from_linear(getattr(module, name), granularity))
    fuse_loaded(model)
    install()
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=8, target_modules=list(LINEARS), task_type="CAUSAL_LM")
    adapted = get_peft_model(model, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    return adapted


class FreesWeights:
    """What ZeRO-3 does to a model, on one rank: a weight is there while its module is called, forward and backward.

    A Parameter keeps its identity. Its data is empty elsewhere, and a copy made for each call, as ZeRO gathers it.
    """

    def __init__(self, model):
        self.values = {p: p.detach().clone() for p in model.parameters()}
        self.copies = []  # weak references to the memory of copies, and the Parameters that they were made for
        self.calls = 0
        for p in model.parameters():
            self._free(p)
        for module in model.modules():
            before, after = self._hooks(module)
            module.register_forward_pre_hook(before)
            module.register_forward_hook(after)

    def gathered_bytes(self, *, frozen):
        """The bytes of copies that are still in memory, of frozen Parameters or of the others."""
        alive = [(array(), p) for array, p in self.copies]
        return sum(array.nbytes for array, p in alive if array is not None and p.requires_grad != frozen)

    def _gather(self, p):
        array = self.values[p].reshape(-1).view(torch.uint8).numpy().copy()
        self.copies.append((weakref.ref(array), p))
        p.data = torch.from_numpy(array).view(p.dtype).view(self.values[p].shape)

    def _free(self, p):
        p.data = torch.empty(0, dtype=p.dtype)

    def _hooks(self, module):
        parameters = list(module.parameters(recurse=False))

        def gather():
            for p in parameters:
                if p.numel() == 0:
                    self._gather(p)

        def free():
            for p in parameters:
                self._free(p)

        class BeforeBackward(torch.autograd.Function):
            @staticmethod
            def forward(_ctx, output):
                return output.detach()

            @staticmethod
            def backward(_ctx, gradient):
                gather()
                return gradient

        class AfterBackward(torch.autograd.Function):
            @staticmethod
            def forward(_ctx, x):
                return x.detach()

            @staticmethod
            def backward(_ctx, gradient):
                free()
                return gradient

        def before(_module, args):
            self.calls += 1
            gather()
            return _each(AfterBackward.apply, args)

        def after(_module, _args, output):
            output = _each(BeforeBackward.apply, output)
            free()
            return output

        # Octavo knows hooks by where they come from.
        before.__module__ = after.__module__ = "deepspeed.runtime.zero.parameter_offload"
        return before, after


def _each(function, given):
    if isinstance(given, torch.Tensor):
        return function(given) if given.requires_grad else given
    if isinstance(given, tuple):
        return tuple(_each(function, value) for value in given)
    return given


def gradients(model):
    return {name: p.grad.numpy().astype(np.float64) for name, p in model.named_parameters() if p.grad is not None}
