"""Cases that tests of the bench time, and workers without processes."""

import json
from typing import Any

from octavo.tools.bench.contenders import Contender
from octavo.tools.bench.worker import Worker
from octavo.tools.bench.workload import Workload
from octavo.tools.shapes import Case, make_case


def preset(name: str, **options) -> Case:
    given = {"layers": None, "tokens": None, "seq": None, "seed": 0, "device": "cpu", "force": True, **options}
    return make_case(preset=name, config=None, **given)


class WorkerHere:
    """In place of `WorkerProcess`: the same worker, told the same by the same JSON, in the process of the test.

    One of its own takes 7 s to import what is imported here already. An error fails the test.
    """

    def __init__(self, case: Case, contender: Contender, _workers: int, workload: Workload | None = None) -> None:
        batches = None if workload is None else workload.to_dict()
        first = json.loads(json.dumps([case.to_dict(), contender.to_dict(), batches]))
        workload = None if first[2] is None else Workload(**first[2])
        self._worker = Worker(Case.from_dict(first[0]), Contender(**first[1]), workload)
        self._asked: list[dict[str, Any]] = []

    def request(self, do: str, **arguments: Any) -> None:
        self._asked.append(json.loads(json.dumps({"do": do, **arguments})))

    def answer(self) -> dict[str, Any]:
        asked = self._asked.pop(0)
        return json.loads(json.dumps(getattr(self._worker, asked.pop("do"))(**asked)))

    def kill(self) -> None:
        assert not self._asked
