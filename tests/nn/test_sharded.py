"""Names of torch's own that shards need: another torch that lacks one, or means something else by it, fails here."""

import inspect

import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _utils
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from octavo.nn import bits


def parameters_of(function):
    return list(inspect.signature(function).parameters)


def test_a_spec_says_where_parts_lie():
    assert parameters_of(DTensorSpec)[:3] == ["mesh", "placements", "tensor_meta"]
    assert TensorMeta._fields == ("shape", "stride", "dtype")
    assert parameters_of(_utils.compute_local_shape_and_global_offset)[:3] == ["global_shape", "mesh", "placements"]


def test_fsdp2_looks_for_hooks_after_it_has_set_the_shard():
    """`FP8FrozenLinear.__setattr__` gives the shard its hooks in between."""
    built = inspect.getsource(_fsdp_param.FSDPParam.__init__)
    assert built.index("self._init_sharded_param(") < built.index("self._init_extensions()")
    assert "self._setattr_on_modules(self.sharded_param)" in inspect.getsource(
        _fsdp_param.FSDPParam._init_sharded_param
    )
    assert "setattr(module, param_name, param)" in inspect.getsource(_fsdp_param.unsafe_setattr_param)
    looked_at = inspect.getsource(_fsdp_param.FSDPParam.all_gather_inputs.fget)
    assert "self._sharded_local_tensor" in looked_at and "(1, 5)" in looked_at
    assert len(parameters_of(bits._send)) == 1 + 5  # a reference to the shard, and what FSDP2 gives


def test_the_rule_about_integers_is_found():
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    assert bits.casts_integers() == (version < (2, 13)) or version == (2, 12)  # which has not been looked at
