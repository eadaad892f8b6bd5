"""`octavo generate`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from octavo.cli.options import option
from octavo.training.errors import UserError


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run of octavo train.")],
    prompt: Annotated[str | None, option("Text", "--prompt", "Text to continue (default: a new line).")] = None,
    length: Annotated[int, option("Text", "--bytes", "Bytes to generate (default: 200).")] = 200,
    temperature: Annotated[
        float, option("Text", "--temperature", "Sampling temperature; 0: always the likeliest byte (default: 0.8).")
    ] = 0.8,
    seed: Annotated[int, option("Text", "--seed", "Seed of the sampling (default: 0).")] = 0,
    device: Annotated[str, option("Run", "--device", "auto, cpu or cuda (default: auto).")] = "auto",
) -> None:
    """Write text with the model of a run: the trained one, or the newest checkpoint of an unfinished run.

    Products are in BF16 on a GPU and in FP32 on a CPU, whatever precision it was trained in.
    """
    from octavo.tools.generate import generate_text
    from octavo.training.display import printable

    console = Console()
    try:
        text, source = generate_text(
            run, prompt=prompt or "\n", length=length, temperature=temperature, seed=seed, device=device
        )
    except ValueError as error:
        raise UserError(str(error)) from error
    console.print(Text(f"From {source}", style="dim"), soft_wrap=True)
    if prompt:
        console.print(Text(printable(prompt), style="dim"), end="", soft_wrap=True)
    console.print(Text(printable(text)), soft_wrap=True)
