"""Sums and differences of two numbers of one or two digits, from the package `reasoning-gym`, and their reward.

    pip install reasoning-gym
    python benchmarks/chain_sum.py benchmarks/chain_sum.jsonl

writes the first 512 different questions of the task `chain_sum`, each with its answer: `rl_smollm.py` trains on them
where the package is not installed. In a third of the questions both numbers have one digit, which a small model soon
learns; the others keep its reward from coming close to 1. As a file of reward functions (`octavo grpo --rewards`), this
one rewards the last number of a completion.
"""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

QUESTIONS = 512


def last_number(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """Give 1 where the last number of a completion is the answer, 0 elsewhere."""
    texts = [each if isinstance(each, str) else each[-1]["content"] for each in completions]
    found = [re.findall(r"-?\d+", text.replace("−", "-")) for text in texts]
    return [float(bool(each) and each[-1] == expected) for each, expected in zip(found, answer, strict=True)]


def main(path: Path) -> None:
    import reasoning_gym

    numbers = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    dataset = reasoning_gym.create_dataset("chain_sum", size=2048, seed=0, **numbers)
    rows = dict(list({entry["question"]: entry["answer"] for entry in dataset}.items())[:QUESTIONS])
    lines = [
        json.dumps({"prompt": [{"role": "user", "content": question}], "answer": answer})
        for question, answer in rows.items()
    ]
    path.write_text("\n".join(lines) + "\n")
    print(f"{len(lines)} questions: {path}")


REWARDS = [last_number]

if __name__ == "__main__":
    main(Path(sys.argv[1]))
