"""The environment that a launcher such as torchrun sets, read before torch is imported."""

import os

from octavo.training.errors import UserError


def launched_ranks() -> int:
    """The number of ranks that a launcher has started; 1 without one."""
    return whole_number("WORLD_SIZE", 1, least=1)


def whole_number(name: str, default: int, *, least: int = 0) -> int:
    """A variable of the environment that a launcher sets to a whole number."""
    value = os.environ.get(name)
    if value is None:
        return default
    if not value.isdecimal() or int(value) < least:
        raise UserError(
            f"{name}={value!r} in the environment: launchers such as torchrun set it to a whole number, at least "
            f"{least}; unset it to run one process"
        )
    return int(value)
