"""The `octavo` command: reads the command line and calls the library. Nothing is computed here.

Exit codes: 0 done; 1 the run could not go on; 2 the request cannot be met; 3 another rank has ended; 130 and 143
stopped by Ctrl-C and SIGTERM. An error that a person can act on is one line on stderr, a few where memory runs out; a
traceback means a bug in Octavo.

A command imports what it needs when it runs: torch takes seconds, and `--help` should not.
"""

import signal
import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from octavo import __version__
from octavo.cli import bench, generate, grpo, plan, sft, train
from octavo.training.errors import UserError
from octavo.training.signals import SIGNALS, Interrupted

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
for command in (train.train, sft.sft, grpo.grpo, generate.generate, plan.plan, bench.bench):
    app.command()(command)


def main() -> None:
    """Run the command; the entry point."""
    try:
        app()
    except UserError as error:
        _fail(str(error), error.exit_code)
    except Interrupted as interrupted:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # all is done, and the exit code is the first signal's
        sys.exit(128 + interrupted.number)
    except KeyboardInterrupt:
        _fail("interrupted", 128 + signal.SIGINT)


def _fail(message: str, code: int) -> None:
    Console(stderr=True).print(Text(f"octavo: {message}", style="red"), soft_wrap=True)
    sys.exit(code)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def octavo(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Train PyTorch models in FP8."""
