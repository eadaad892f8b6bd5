"""Tasks of reasoning-gym: the same prompts in every process, and verifiers that hang or crash."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import reasoning_gym
from commands import Command
from decoder_cases import build
from reasoning_gym.factory import DATASETS
from rich.console import Console
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from octavo.grpo import run
from octavo.grpo.display import Display
from octavo.rl import gym, gym_process
from octavo.rl.gym import Gym
from octavo.rl.tasks import read_task
from octavo.training.checkpoint import list_checkpoints
from octavo.training.errors import RunError, UserError
from octavo.training.files import read_object

HANGS, CRASHES = "9**9**9**9", "__import__('os').abort()"
# Their prompts depend on the hash seed; those of list_functions on the global generator, too.
DRAWN_FROM_SETS = ("ransom_note", "isomorphic_strings", "list_functions")


@pytest.fixture
def countdown():
    return Gym("countdown,size=2", seed=0)


def child_of(task):
    return task._process._child


def test_prompts_are_the_same_under_every_hash_seed():
    codes = {
        "package": "import reasoning_gym as r\nfor name in {}: print(list(r.create_dataset(name, size=5, seed=0)))",
        "task": "from octavo.rl.gym import Gym\nfor name in {}: print(list(Gym(name + ',size=5', 0).entries()))",
    }
    runs = {
        (kind, seed): subprocess.Popen(
            [sys.executable, "-c", code.format(DRAWN_FROM_SETS)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        for kind, code in codes.items()
        for seed in "12"
    }
    printed = {key: run.communicate()[0].splitlines() for key, run in runs.items()}
    assert all(run.returncode == 0 for run in runs.values())
    assert all(a != b for a, b in zip(printed["package", "1"], printed["package", "2"], strict=True))
    assert printed["task", "1"] == printed["task", "2"] and len(printed["task", "1"]) == len(DRAWN_FROM_SETS)


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "word_sorting"])
def test_prompts_and_scores_are_the_packages_own(name):
    dataset, task = reasoning_gym.create_dataset(name, size=3, seed=7), Gym(f"{name},size=3", seed=7)
    for index, (entry, ours) in enumerate(zip(dataset, task.entries(), strict=True)):
        assert (ours["question"], ours["answer"]) == (entry["question"], entry["answer"])
        for text in (entry["answer"], f"it is {entry['answer']}", "12", "", "1 +", "no", "\0"):
            assert task.score(text, index) == dataset.score_answer(answer=text, entry=entry), text


def test_a_task_with_options():
    task = read_task("reasoning-gym:chain_sum,max_terms=2,size=20")
    assert task.name == "chain_sum" and task.description == "20 prompts of reasoning-gym's chain_sum"
    rows = list(task.rows[:2])
    assert all(row["entry"]["metadata"]["num_terms"] == 2 for row in task.rows)
    assert rows[0]["prompt"][0]["content"].endswith("=\nGive the final answer between <answer> and </answer>.")
    texts = (f"so <answer> {rows[0]['answer']} </answer>", "none")
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    scores = task.rewards.score([row["prompt"] for row in rows], completions, [[1], [1]], task.columns(rows))
    assert scores.rewards.tolist() == [1.0, 0.0] and scores.means.keys() == {"chain_sum"}
    assert json.dumps(list(task.rows), sort_keys=True)


def test_a_verifier_that_hangs(countdown, monkeypatch):
    answers = [entry["answer"] for entry in countdown.entries()]
    child = child_of(countdown)
    with monkeypatch.context() as patching:
        patching.setattr(gym, "LIMIT", 0.3)
        assert countdown.score(HANGS, 0) == 0
    assert child.returncode == -signal.SIGALRM
    assert [countdown.score(answer, index) for index, answer in enumerate(answers)] == [1, 1]


@pytest.mark.parametrize(
    "answer",
    [
        "__import__('os').kill(__import__('os').getpid(),__import__('signal').SIGSTOP)",
        f"[__import__('signal').setitimer(0,0),{HANGS}]",
    ],
    ids=["stopped", "timer"],
)
def test_a_verifier_that_no_timer_ends(answer, countdown, monkeypatch):
    right, child = next(countdown.entries())["answer"], child_of(countdown)
    with monkeypatch.context() as patching:
        patching.setattr(gym, "LIMIT", 0.2)
        patching.setattr(gym, "GRACE", 0.2)
        assert countdown.score(answer, 0) == 0
    assert child.returncode == -signal.SIGKILL
    assert countdown.score(right, 0) == 1


def test_a_process_that_crashes(countdown, caplog):
    answers = [entry["answer"] for entry in countdown.entries()]
    child = child_of(countdown)
    for _ in range(2):
        assert countdown.score(CRASHES, 0) == 0 and child.returncode == -signal.SIGABRT
    (said,) = (record.message for record in caplog.records)
    assert said.startswith("octavo: the verifier of countdown: reasoning-gym's process ended with code -6; ")
    assert countdown.score(answers[0], 0) == 1
    child_of(countdown).kill()  # between two requests
    child_of(countdown).wait()
    assert countdown.score(answers[1], 1) == 1


def test_what_no_answer_is_to_blame_for(countdown):
    """An entry that a process cannot make again, and a package that is missing, are no reward of 0."""
    with pytest.raises(RunError, match=r"TASK countdown,size=2: answer to prompt x cannot be scored: "):
        countdown.score("1", "x")
    assert countdown.score(next(countdown.entries())["answer"], 0) == 1

    class Dataset(list):
        seed = 0

        def score_answer(self, answer, entry):  # noqa: ARG002
            raise {"import": ImportError, "memory": MemoryError, "value": ValueError}[answer]

    server = gym_process.Server()
    server.dataset, server.made = Dataset([{}]), {}
    assert server.score("memory", 0, 9.0) == server.score("value", 0, 9.0) == 0
    with pytest.raises(ImportError):
        server.score("import", 0, 9.0)


def test_plain_values():
    found = gym_process.plain(
        {"a": np.int64(5), 2: np.bool_(True), "c": np.float32(2.5), "d": np.array([[1]]), "e": Fraction(1, 2)}
    )
    assert found == {"a": 5, "2": True, "c": 2.5, "d": [[1]], "e": "1/2"} and found["2"] is True


def test_an_interrupt_ends_the_process(countdown):
    def interrupt(*_):
        raise KeyboardInterrupt

    answer, child = next(countdown.entries())["answer"], child_of(countdown)
    previous = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            countdown.score(HANGS, 0)
    finally:
        signal.signal(signal.SIGALRM, previous)
    assert child.returncode == -signal.SIGKILL
    assert countdown.score(answer, 0) == 1


def test_no_process_is_left(countdown):
    """Neither when a task is done with, nor when Octavo is killed while a verifier hangs."""
    child = child_of(countdown)
    other = Gym("chain_sum,size=1", 0)
    others = child_of(other)
    del other
    assert others.returncode == -signal.SIGKILL and child.poll() is None
    code = (
        "from octavo.rl import gym\ngym.LIMIT = 3.0\ntask = gym.Gym('countdown,size=1', 0)\n"
        f"print(task._process._child.pid, flush=True)\ntask.score({HANGS!r}, 0)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        number = int(process.stdout.readline())
        time.sleep(0.5)
        process.kill()
    while is_running(number):
        time.sleep(0.05)


def is_running(number):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_options_of_the_kind_that_defaults_have():
    """Whole numbers where a float's default is one, lists for tuples, and a seed that another process has, too."""
    for source in ("manipulate_matrix,w_crop=0.5", "manipulate_matrix,w_crop=2", "countdown,seed=9"):
        assert len(read_task(f"{source},size=1").rows) == 1
    task = Gym('countdown,size=5,operators=["+","-"]', 0)
    assert all(not {"*", "/"} & set(entry["answer"]) for entry in task.entries())


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("chain_sm", "TASK chain_sm: neither a file nor a task of reasoning-gym; nearest: chain_sum, "),
        ("reasoning-gym:nonsense", "TASK nonsense: neither a file nor a task of reasoning-gym; nearest: n_queens$"),
        ("reasoning-gym:", "TASK 'reasoning-gym:': no name in it; give a .jsonl, a .py, or a task such as"),
        ("", "TASK '': no name in it"),
        (
            "reasoning-gym:0",
            "TASK 0: neither a file nor a task of reasoning-gym, which has ab, acre, .*, zebra_puzzles",
        ),
        ("chain_sum,max_terms", "'max_terms' is no option; write NAME,OPTION=VALUE,... without spaces"),
        ("chain_sum, max_terms=2", "' max_terms=2' is no option; write NAME,OPTION=VALUE,... without spaces"),
        ("chain_sum,size=2,max_terms=3,size=4", "size is given twice; leave one out"),
        ("chain_sum,terms=2", "chain_sum has no option 'terms'; it has min_terms, max_terms, .*, size"),
        ("chain_sum,max_terms=1", "TASK chain_sum,max_terms=1: max_terms must be >= min_terms"),
        ("chain_sum,max_terms=two", "TASK chain_sum,max_terms=two: max_terms='two': a whole number, such as 6"),
        ("chain_sum,max_terms=", "max_terms='': a whole number, such as 6"),
        ("chain_sum,max_terms=null", "max_terms=None: a whole number, such as 6"),
        ("chain_sum,max_terms=true", "max_terms=True: a whole number"),
        ("chain_sum,allow_negation=1", "allow_negation=1: true or false, such as false"),
        ("number_format,max_delta=a", "max_delta='a': a number, such as 10.0"),
        ("countdown,operators=+", r"operators='\+': a list in JSON, such as \["),
        ("countdown,seed=null", "seed=None: a whole number"),
        ("countdown,seed=x", "seed='x': a whole number"),
        ("countdown,seed=1.5", "seed=1.5: a whole number"),
        ("countdown,seed=true", "seed=True: a whole number"),
        ("chain_sum,size=0", "size=0: the number of prompts, at least 1"),
        ("chain_sum,size=1e3", "size=1000.0: the number of prompts, at least 1"),
        ("composite", "TASK composite: a mixture of other tasks, .*; name one task"),
        ("x" * 300, f"TASK {'x' * 300}: neither a file nor a task"),
    ],
)
def test_requests_that_cannot_be_met(source, words):
    with pytest.raises(UserError, match=words) as caught:
        read_task(source)
    assert "\n" not in str(caught.value)


def test_prompts_are_made_once(tmp_path, monkeypatch):
    """Those of a run that is resumed come from its folder; damaged there, they are made again."""
    task = read_task("ransom_note,size=3")
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in task.rows))
    assert task.made and not read_task(str(tmp_path / "p.jsonl")).made
    run._keep_prompts(tmp_path, task)
    assert run._kept_prompts(tmp_path) == list(task.rows)
    with monkeypatch.context() as patching:
        patching.setattr(Gym, "entries", None)
        again = read_task("ransom_note,size=3", rows=run._kept_prompts(tmp_path))
    assert run._digest(again) == run._digest(task) and again.description == task.description
    (tmp_path / "made-prompts.jsonl").write_text('{"prompt": ')
    assert run._kept_prompts(tmp_path) is None is run._kept_prompts(tmp_path / "nowhere")


def test_a_package_that_makes_other_prompts():
    """Answers are scored against what was asked, not against what a newer package would ask."""
    task = read_task("chain_sum,size=2")
    rows = [*task.rows]
    rows[0] = rows[0] | {"entry": rows[0]["entry"] | {"question": "another one"}}
    again = read_task("chain_sum,size=2", rows=rows)

    def score(number):
        chat = [[{"role": "assistant", "content": str(rows[number]["answer"])}]]
        return again.rewards.score([rows[number]["prompt"]], chat, [[1]], again.columns(rows[number : number + 1]))

    assert score(1).rewards.tolist() == [1.0]
    with pytest.raises(RunError, match=r"answer to prompt 0 cannot be scored: reasoning-gym .* makes another prompt"):
        score(0)


def test_ctrl_c_is_for_the_run_alone(countdown):
    """A terminal sends it to all processes of a group."""
    assert os.getpgid(child_of(countdown).pid) == child_of(countdown).pid != os.getpgrp()


def test_the_package_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    for source in ("chain_sum", "reasoning-gym:chain_sum"):
        with pytest.raises(UserError, match=r"TASK chain_sum.* needs the package reasoning-gym: pip install 'octavo\["):
            read_task(source)


def test_progress_is_shown_on_a_terminal_alone():
    for is_terminal in (True, False):
        words = io.StringIO()
        display = Display(Console(file=words, force_terminal=is_terminal, width=80))
        assert len(read_task("chain_sum,size=3", watch=display.watch_prompts).rows) == 3
        assert ("making prompts" in words.getvalue()) == is_terminal == bool(words.getvalue())


def test_all_tasks_make_prompts_and_take_their_own_answers():
    """In two processes, in opposite orders: an entry depends on its number alone, so a process may be replaced."""
    first, second = gym._Process(), gym._Process()
    for name in sorted(DATASETS.keys() - {"composite"}):
        for process in (first, second):
            process.ask("open", name, {"seed": 0, "size": 2})
        entries = [first.ask("entry", index) for index in (0, 1)]
        assert [second.ask("entry", index) for index in (1, 0)] == entries[::-1], name
        json.dumps(entries)
        for index, entry in enumerate(entries):
            assert isinstance(entry["question"], str), name
            if entry["answer"] is not None:  # there may be several, and none is given
                assert first.ask("score", str(entry["answer"]).strip(), index, 60.0) == 1, name
        wrong = second.ask("score", "?", 0, 60.0)
        assert 0 <= wrong < 1 or name == "game_of_life_halting", name  # which takes any text for a right answer


@pytest.fixture
def speller(tmp_path):
    """A tiny Llama on letters, True and False: some of what it writes earns a reward in ransom_note."""
    letters = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.add_tokens(["True", "False"])
    tokenizer.decoder = decoders.Fuse()
    folder = tmp_path / "speller"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(folder)
    build(vocab_size=32, max_position_embeddings=512, eos_token_id=1).bfloat16().save_pretrained(folder)
    return str(folder)


def test_a_run_killed_and_resumed_under_another_hash_seed(speller, tmp_path):
    options = ["--steps", "6", "--save-interval", "2", "--prompts", "2", "--completions", "8", "--max-new-tokens", "6"]
    options += ["--rank", "4", "--lr", "1e-2", "--device", "cpu"]
    arguments = ["grpo", speller, "reasoning-gym:ransom_note,size=16", *options]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run = Command(*arguments, "--out", str(whole), environment={"PYTHONHASHSEED": "1"})
    process = Command(*arguments, "--out", str(cut), environment={"PYTHONHASHSEED": "2"})
    while not list_checkpoints(cut) and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    output, error = run.communicate()
    assert run.returncode == 0 and "16 prompts of reasoning-gym's ransom_note; rewards: ransom_note" in output, error
    assert 2 <= len(rewards_of(cut)) < 6
    resumed = Command("grpo", "--resume", "--out", str(cut), environment={"PYTHONHASHSEED": "3"})
    output, error = resumed.communicate()
    assert resumed.returncode == 0 and "Resuming after step" in output, error
    assert len((cut / "made-prompts.jsonl").read_text().splitlines()) == 16
    assert rewards_of(cut) == rewards_of(whole) and len({reward for _, reward, _ in rewards_of(whole)}) > 2
    assert len({read_object(folder / "config.json", "")["task_sha256"] for folder in (whole, cut)}) == 1


def rewards_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["reward"], row["loss"]) for row in rows]
