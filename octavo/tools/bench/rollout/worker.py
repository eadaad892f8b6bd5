"""A way in its own process: `python -m octavo.tools.bench.rollout.worker`, driven by JSON lines.

The first line is `{"case": …, "way": …}`; every further line asks for something and gets one line back:

    {"do": "start"}                          import (all workers at once)
    {"do": "load"}                           the model
    {"do": "rollout", "size": …, "runs": 2, "peer_tokens": null}    rollouts of one size
    {"do": "grpo", "size": …, "steps": 2, …}                        whole steps of GRPO
"""

import json
import time
from collections.abc import Callable
from typing import Any, TextIO

from octavo.tools.bench.prepared_model import PreparedModel
from octavo.tools.bench.rollout.measure import GIB, MemoryMeter, measure
from octavo.tools.bench.rollout.models import prepare
from octavo.tools.bench.rollout.ways import Way
from octavo.tools.bench.worker import answer_requests, serve_parent
from octavo.tools.rollouts import Size
from octavo.tools.shapes import Case


class RolloutWorker:
    """State of a worker between two requests."""

    def __init__(self, case: Case, way: Way) -> None:
        self.case, self.way = case, way
        self._prepared: PreparedModel | None = None

    def start(self) -> dict[str, Any]:
        return {}

    def load(self) -> dict[str, Any]:
        started = time.perf_counter()
        self._prepared = prepare(self.case, self.way)
        memory = MemoryMeter(self.case.device)
        allocated = memory.read()["before_gib"]
        weights = sum(p.nbytes for p in [*self._prepared.model.parameters(), *self._prepared.model.buffers()])
        return {
            "summary": self._prepared.summary,
            "seconds": time.perf_counter() - started,
            "weights_gib": weights / GIB,
            "loaded_gib": allocated,
        }

    def rollout(self, size: dict[str, int], runs: int, peer_tokens: int | None) -> dict[str, Any]:
        return measure(self._model, self.case, self.way, Size(**size), runs=runs, peer_tokens=peer_tokens)

    def grpo(self, size: dict[str, int], steps: int, **options: Any) -> dict[str, Any]:
        from octavo.tools.bench.rollout.grpo_step import measure_steps

        return measure_steps(self._model, self.case, self.way, Size(**size), steps=steps, **options)

    @property
    def _model(self) -> Any:
        assert self._prepared is not None
        return self._prepared.model


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests for a way to generate."""
    setup = json.loads(requests.readline())
    worker = RolloutWorker(Case.from_dict(setup["case"]), Way(**setup["way"]))
    commands: dict[str, Callable[..., dict[str, Any]]] = {
        "start": worker.start,
        "load": worker.load,
        "rollout": worker.rollout,
        "grpo": worker.grpo,
    }
    answer_requests(commands, requests, answers)


if __name__ == "__main__":
    serve_parent(serve)
