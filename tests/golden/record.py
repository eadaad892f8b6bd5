"""Write down the bits of every case, or compare them with those written down.

    python tests/golden/record.py FILE [--device cuda] [--against OTHER] [--only TEXT]

Runs each case twice and marks the tensors that differ between the two runs (sums in any order on a GPU). With
`--against`, prints every tensor whose bits differ and exits with 1 if there is one that both runs of both files agree
on.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from cases import all_cases, digest, machine
from transformers.utils import logging

UNSTABLE = "unstable"


def record(device: str, only: str = "") -> dict[str, Any]:
    """Bits of the cases whose name contains `only`, and of the machine."""
    cases = {}
    for name, case in all_cases(device).items():
        if only not in name:
            continue
        first, second = ({key: digest(value) for key, value in case().items()} for _ in range(2))
        cases[name] = {
            key: [*value, *([] if value[0] == second[key][0] else [UNSTABLE])] for key, value in first.items()
        }
        print(f"{name}: {len(first)} tensors", flush=True)
    return {"torch": torch.__version__, "device": device, "machine": machine(device), "cases": cases}


def differences(actual: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Tensors of a case that are on one side only, or have other bits and are stable on both."""
    lines = [f"{key}: on one side only" for key in sorted(actual.keys() ^ expected.keys())]
    for key in (key for key in actual if key in expected):
        mine, wanted = actual[key], expected[key]
        if mine[0] != wanted[0] and UNSTABLE not in (*mine, *wanted):
            lines.append(f"{key}: bits {mine[0]} (norm {mine[1]}) instead of {wanted[0]} (norm {wanted[1]})")
    return lines


def write(recorded: dict[str, Any], file: Path) -> None:
    """JSON with one tensor a line."""
    cases = ",\n".join(
        f" {json.dumps(name)}: {{\n"
        + ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in tensors.items())
        + "}"
        for name, tensors in recorded["cases"].items()
    )
    about = json.dumps({key: value for key, value in recorded.items() if key != "cases"})
    file.write_text(f'{about[:-1]}, "cases": {{\n{cases}}}}}\n')


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    logging.disable_progress_bar()
    recorded = record(options.device, options.only)
    write(recorded, options.file)
    if options.against is None:
        return 0
    expected = json.loads(options.against.read_text())["cases"]
    lines = [
        f"{name}: {line}"
        for name, tensors in recorded["cases"].items()
        for line in differences(tensors, expected.get(name, {}))
    ]
    print(*lines, sep="\n")
    print(f"{len(lines)} differences")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
