"""The shipped YAML files for `accelerate launch`: Accelerate reads them, and knows every name in them."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import DistributedType

EXAMPLES = Path(__file__).parents[2] / "examples" / "accelerate"
KINDS = {
    "fp8.yaml": DistributedType.NO,
    "ddp.yaml": DistributedType.MULTI_GPU,
    "fsdp2.yaml": DistributedType.FSDP,
    "deepspeed.yaml": DistributedType.DEEPSPEED,
}


def test_every_file_is_checked():
    assert {path.name for path in EXAMPLES.glob("*.yaml")} == set(KINDS)


@pytest.mark.parametrize("name", KINDS)
def test_accelerate_reads_it(name):
    config = load_config_from_file(str(EXAMPLES / name))  # raises for a name that it does not know
    assert isinstance(config, ClusterConfig) and config.mixed_precision == "fp8"
    assert config.distributed_type == KINDS[name]
    known = {action.dest for action in launch_command_parser()._actions}
    for section in (config.fsdp_config, config.deepspeed_config):
        assert set(section) <= known, set(section) - known
    first_line = (EXAMPLES / name).read_text().splitlines()[0]
    assert first_line == f"# accelerate launch --config_file examples/accelerate/{name} examples/accelerate/loop.py"


def test_fsdp_means_version_two_and_deepspeed_the_scripts_accumulation():
    fsdp = yaml.safe_load((EXAMPLES / "fsdp2.yaml").read_text())["fsdp_config"]
    assert fsdp["fsdp_version"] == 2 and fsdp["fsdp_reshard_after_forward"] is True
    deepspeed = yaml.safe_load((EXAMPLES / "deepspeed.yaml").read_text())["deepspeed_config"]
    steps = deepspeed["gradient_accumulation_steps"]
    assert f"gradient_accumulation_steps={steps}" in (EXAMPLES / "loop.py").read_text()
