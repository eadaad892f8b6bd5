"""Child process of `gym.py`: serves a task of reasoning-gym over the connection whose number is its argument.

A script that imports nothing of Octavo, and so runs without torch. A request is the name of a method of `Server` and
its arguments; the answer is a pair of what it returned and, if it raised, a line that says why. The process ends with
the connection.
"""

import copy
import dataclasses
import difflib
import importlib.metadata
import json
import random
import resource
import signal
import sys
import typing
from multiprocessing.connection import Connection
from typing import Any

MEMORY = 8 << 30  # a verifier that needs more raises MemoryError


class Server:
    """Methods that the parent may call, on one dataset."""

    def open(self, name: str, options: dict[str, Any]) -> None:
        """Create the dataset of a task."""
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if name == "composite":
            raise ValueError("a mixture of other tasks, with options that are tasks themselves; name one task")
        if name not in DATASETS:
            near = difflib.get_close_matches(name, DATASETS, n=5, cutoff=0.5)
            has = f"; nearest: {', '.join(near)}" if near else f", which has {', '.join(sorted(DATASETS))}"
            raise ValueError(f"neither a file nor a task of reasoning-gym{has}")
        known = {field.name: field for field in dataclasses.fields(DATASETS[name][1])}
        for option, value in options.items():
            if option not in known:
                raise ValueError(f"{name} has no option {option!r}; it has {', '.join(known)}")
            check_kind(known[option], value)
        self.dataset: Any = reasoning_gym.create_dataset(name, **options)
        self.made: dict[int, dict[str, Any]] = {}

    def entry(self, index: int) -> Any:
        """Return an entry as plain values, which any process can read and compare."""
        return plain(self._make(index))

    def score(self, text: str, index: int, limit: float, asked: dict[str, Any] | None = None) -> float:
        """Return the score of an answer, 0 if it makes the verifier raise, as text does where a number is expected.

        What no answer can be blamed for is raised: an entry that cannot be made, or a package that is missing. After
        `limit` seconds a signal ends the process: nothing else stops a computation inside of C.
        """
        entry = copy.deepcopy(self._make(index))  # verifiers may change it
        if asked is not None and any(plain(entry[name]) != asked[name] for name in ("question", "answer")):
            version = importlib.metadata.version("reasoning-gym")
            raise ValueError(f"reasoning-gym {version} makes another prompt of it; install that of the run's beginning")
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            return float(self.dataset.score_answer(answer=text, entry=entry))
        except ImportError:
            raise
        except Exception:
            return 0.0
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def _make(self, index: int) -> dict[str, Any]:
        import numpy

        if index not in self.made:
            random.seed(self.dataset.seed + index)  # `list_functions` and `codeio` draw from the global generators
            numpy.random.seed(random.getrandbits(32))
            self.made[index] = self.dataset[index]
        return self.made[index]


def check_kind(field: dataclasses.Field[Any], value: Any) -> None:
    """Refuse a value that is not of the kind of the option's default: the package would compare the two."""
    made = field.default_factory
    default: Any = field.default if made is dataclasses.MISSING else made()
    if value is None and type(None) in typing.get_args(field.type):
        return
    if isinstance(default, bool):
        allowed, what = isinstance(value, bool), "true or false"
    elif isinstance(default, float) or (isinstance(default, int) and field.type is float):
        allowed, what = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif isinstance(default, int):
        allowed, what = type(value) is int, "a whole number"
    elif isinstance(default, list | tuple):
        allowed, what = isinstance(value, list), "a list in JSON"
    else:
        return
    if not allowed:
        raise ValueError(f"{field.name}={value!r}: {what}, such as {json.dumps(plain(default))}")


def plain(value: Any) -> Any:
    """Return a value as JSON would have it: some entries hold fractions, numbers of NumPy, or keys that are numbers."""
    import numpy

    if isinstance(value, numpy.generic | numpy.ndarray):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    for kind in (bool, int, float):
        if isinstance(value, kind):
            return kind(value)
    return None if value is None else str(value)


def main(parent: Connection) -> None:
    """Answer requests until the parent closes the connection, or is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the run decides what an interrupt means, and ends this process
        signal.signal(number, signal.SIG_IGN)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard), hard))
    server = Server()
    try:
        while True:
            method, *arguments = parent.recv()
            answer = why = None
            try:
                answer = getattr(server, method)(*arguments)
            except Exception as error:
                why = " ".join(str(error).split()) or type(error).__name__
            parent.send((answer, why))
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
