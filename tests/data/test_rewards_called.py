"""Reward functions, ours and the user's: which are taken, what they are given, may answer and do."""

import asyncio
import inspect
import itertools
import math
import os
import random
import signal
import sys
import tempfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

import rewards as rewards_package
from grpo.data.reward_calls import RewardFailed
from grpo.data.reward_functions import RewardFunctions
from grpo.logs.metrics import reward_metrics
from grpo.types import Batch, Prompt
from rewards.formats import environment_prompt, policy_prompt

FEN = "8/8/8/4k3/8/8/4P3/4K3 w - - 0 1"
RIGHT = "8/8/8/4k3/4P3/8/8/4K3 b - - 0 1+0.001+0+0"
MOVE = Prompt(
    "m:1",
    environment_prompt(FEN, "e2e4", ["e2e4"]),
    {"task": "environment", "fen": FEN, "action": "e2e4", "history": ["e2e4"]},
)
PLAY = Prompt(
    "p:1", policy_prompt(FEN), {"task": "policy", "fen": FEN, "moves": ["e2e4", "e1d2"], "evals": [0.5, 0.1]}
)
OWN = [Prompt(f"o:{i}", f"question {i}", {"task": "custom", "answer": i}) for i in range(2)]


def batch_of(prompts: list[Prompt], completions: list[str]) -> Batch:
    """Completions of one token a letter, its code point the token."""
    lengths = torch.tensor([len(text) for text in completions])
    rows = [torch.tensor([ord(letter) for letter in text], dtype=torch.long) for text in completions]
    ids, ended = pad_sequence(rows, batch_first=True), torch.ones(len(rows), dtype=torch.bool)
    return Batch.of_rows(
        prompts,
        [[1] for _ in prompts],
        ids,
        lengths,
        terminated=ended,
        sampler_logp=torch.zeros(ids.shape),
        texts=completions,
    )


ASKED = batch_of(OWN, ["0", "12", "1", ""])


def in_file(folder: Path, source: str, name: str = "mine.py") -> RewardFunctions:
    """The reward of its function f."""
    (folder / name).write_text(source)
    return RewardFunctions([f"{folder / name}:f"])


def brevity(completions, **columns):
    return [-float(len(text)) for text in completions]


def right(completions, answer, **columns):
    return [1 if text == str(a) else None for text, a in zip(completions, answer, strict=True)]


def test_a_reward_and_prompts_that_are_not_for_each_other_are_refused_beforehand():
    class Called:
        def __call__(self, completions, limit, **columns): ...

    def two(completions, *, limit, colour, completion_ids, answer, **columns): ...
    def content(completions, answer, *others, limit=3, **columns): ...
    def closed(prompts, completions): ...
    def all_by_name(prompts, completions, completion_ids, task, answer): ...
    def without_ids(prompts, completions, *, task=None, answer=None): ...

    for functions, prompts, said in (
        ([content, two], OWN, r"'two' is called with .*: missing a required .*'limit'. Give --prompts"),
        ([Called()], OWN, "'Called' is called with prompts, .*, task, answer: missing a required .*'limit'"),
        ([closed], OWN, r"'closed' is called .* unexpected .*'completion_ids'.*and \*\*columns"),
        ([all_by_name, without_ids], OWN, "'without_ids' is called .* unexpected .*'completion_ids'"),
    ):
        with pytest.raises(ValueError, match=said):
            RewardFunctions(functions).check((), prompts)
    RewardFunctions([content, all_by_name, "policy", "environment"]).check((), OWN)
    some = [*OWN, Prompt("o:3", "question", {"limit": 3, "colour": "red"})]  # None for the others
    for prompts in ([], some):
        RewardFunctions([two, Called()]).check((), prompts)


def test_a_file_that_fails_on_import_says_why_and_is_not_kept(tmp_path):
    for source, said in {
        "import no_such": r"ModuleNotFoundError\(.*no_such",
        "def f(:": "SyntaxError",
        "1 / 0": "ZeroDivisionError",
    }.items():
        with pytest.raises(ValueError, match=rf"^reward file '.*mine.py' fails on import: {said}"):
            in_file(tmp_path, source)
        assert "reward_file_mine" not in sys.modules


POOLED = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from neighbour import half

def f(completions, **columns):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return list(pool.map(length, completions))

def length(text):
    return half(len(text))
"""


def test_a_file_elsewhere_may_import_its_neighbour_and_start_processes(tmp_path, monkeypatch):
    """Which import it by its name, whatever the folder that the run was started in; unless the name is a
    module's, whose place it does not take: rewards.py is the obvious name, and ours is called so, too.
    """
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("def half(number):\n    return number / 2\n")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    asked = batch_of(OWN, ["a", "bcd"])
    assert in_file(Path(".."), POOLED, "pooled_rewards.py")(asked).rewards.tolist() == [0.5, 1.5]
    for name in ("random.py", "rewards.py"):
        score = in_file(tmp_path, "def f(completions, **k):\n    return [2.0] * len(completions)\n", name)
        RewardFunctions(["policy"])
        assert score(asked).rewards.tolist() == [2.0, 2.0]
    assert sys.modules["rewards"] is rewards_package and sys.modules["random"] is random


def test_functions_score_with_weights_and_none_means_not_mine():
    """Question 0 is answered "0" and "12", question 1 "1" and "": 0.5 a letter off, 3 if right."""
    scores = RewardFunctions([brevity, right], (0.5, 3.0))(ASKED)
    assert scores.names == ("brevity", "right")
    assert scores.table.nan_to_num(99).tolist() == [[-1, 1], [-2, 99], [-1, 1], [0, 99]]
    assert scores.rewards.tolist() == [-0.5 + 3, -1.0, -0.5 + 3, 0.0]
    assert RewardFunctions([brevity, right])(ASKED).rewards.tolist() == [0.0, -2.0, 0.0, 0.0]  # each once
    scores = RewardFunctions([right])(ASKED)  # a row that none scores: nan in an evaluation
    with pytest.raises(ValueError, match=r"scored row 1 \(2 of 4 rows\).* add a reward function"):
        _ = scores.rewards
    assert scores.rewards_where_scored.nan_to_num(99).tolist() == [1.0, 99.0, 1.0, 99.0]
    for kind in (tuple, numpy.array, torch.tensor):  # other sequences of numbers will do
        table = RewardFunctions([lambda kind=kind, **given: kind([1.0, 0, True, 9])])(ASKED).table
        assert table.flatten().tolist() == [1.0, 0.0, 1.0, 9.0]


def test_it_is_called_as_trl_calls_it():
    """Text or messages, completion_ids without padding, columns a list each, by name."""
    seen: dict[str, Any] = {}

    def spy(prompts, **given):
        seen.update(given, prompts=prompts)
        return [0.0] * len(prompts)

    talk = [{"role": "user", "content": "2 + 2?"}]
    prompts = [OWN[0], Prompt("t:1", "<user>2 + 2?<assistant>", {"task": "custom", "answer": 4}, talk)]
    RewardFunctions([spy])(batch_of(prompts, ["a", "bcd", "", "e"]))
    assert seen["prompts"] == ["question 0", "question 0", talk, talk]
    said = [[{"role": "assistant", "content": text}] for text in ("", "e")]
    assert seen["completions"] == ["a", "bcd", *said]
    assert seen["completion_ids"] == [[97], [98, 99, 100], [], [101]] and seen["answer"] == [0, 0, 4, 4]


def test_deviations_are_trls_and_those_within_groups_are_told_apart():
    """TRL's nanstd of all rewards, 0, 1, 4 and 3: mean 2, squares 4 + 1 + 4 + 1, of which a third."""

    def of_length(completions, **columns):
        return [float(len(text)) for text in completions]

    metrics = reward_metrics(RewardFunctions([of_length])(batch_of(OWN, ["", "a", "abcd", "abc"])), 2)
    assert metrics["reward_std"] == pytest.approx((10 / 3) ** 0.5)
    assert metrics["rewards/of_length/std"] == pytest.approx((10 / 3) ** 0.5)
    assert metrics["reward_std_within_groups"] == pytest.approx(0.5**0.5)


def test_what_a_reward_logs_and_what_it_is_told_of_the_run():
    def told(completions, trainer_state, log_metric, log_extra, **columns):
        log_extra("letters", [len(text) for text in completions])
        log_metric("asked", trainer_state.global_step)
        log_metric("asked", trainer_state.max_steps)
        return [1.0] * len(completions)

    def plain(prompts, completions, completion_ids, task, answer):  # which takes none of it
        return [1.0] * len(completions)

    score = RewardFunctions([told, plain])
    score.state.global_step, score.state.max_steps = 3, 5
    scores, other = score(batch_of(OWN, ["a", "bcd", "", "e"])), score(batch_of(OWN[:1], ["xyz", ""]))
    assert [extra["letters"] for extra in scores.extra] == [1, 3, 0, 1]
    assert scores.metrics == {"asked": [3.0, 5.0]} and reward_metrics(scores, 2)["asked"] == 4
    joined, replaced = type(scores).join([scores, scores]), scores.replace_groups([1], other, 2)
    assert len(joined.extra) == 8 and joined.metrics == {"asked": [3.0, 5.0, 3.0, 5.0]}
    assert [extra["letters"] for extra in replaced.extra] == [1, 3, 3, 0]
    with pytest.raises(RewardFailed, match=r"log_extra\('letters'\) got 1 values for 4 completions"):
        RewardFunctions([lambda log_extra, **columns: log_extra("letters", [1])])(ASKED)


def test_coroutine_functions_are_awaited_together():
    met, loops = asyncio.Event(), set()

    async def first(completions, some=None, **columns):
        await asyncio.wait_for(met.wait(), 20)  # which the second sets: they are awaited together
        loops.add(asyncio.get_running_loop())
        return [1.0] * len(completions)

    class Second:
        async def __call__(self, completions, log_metric, **columns):
            met.set()
            log_metric("second", 7)
            return (None if text == "no" else 2.0 for text in completions)

    async def broken(completions, **columns):
        raise KeyError("gone")

    score = RewardFunctions([partial(first, some=True), Second()])
    for _ in range(2):  # in one loop, which clients that are kept open want
        scores = score(batch_of(OWN, ["a", "no", "b", "c"]))
    assert scores.rewards.tolist() == [3.0, 1.0, 3.0, 3.0] and scores.metrics == {"second": [7.0]}
    assert len(loops) == 1
    with pytest.raises(RewardFailed, match=r"'broken' failed with KeyError in .*\.py, line \d+: 'gone'"):
        RewardFunctions([first, broken])(ASKED)


class Bad:
    __float__ = __str__ = __repr__ = lambda self: 1 / 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ([1.0] * 3, "returned 3 scores for 4 completions: it must return a list of 4"),
        ([], "returned 0 scores for 4 completions"),
        (itertools.repeat(1.0), "returned more than 4 scores for 4 completions"),
        (0.5, "returned a float .*: it must return a list of 4"),
        (["1"] * 4, "'1' is text, not a number.*: it must return a list of 4, one number, or None"),
        ("1234", "returned a str .which is no list"),
        ({0: 1.0, 1: 2.0}, "returned a dict .which is no list"),
        ([[1.0]] * 4, "returned .*: it must return a list of 4"),
        ([1.0, math.nan] * 2, "returned NaN for completion 1: .* or None for what it does"),
        ([1.0, -math.inf] * 2, "returned -inf for completion 1: return finite numbers"),
        ([10**400] * 4, "int too large to convert to float"),
        ([Bad()] * 4, r"returned a list \(division by zero\): it must return a list of 4"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_what_is_no_list_of_numbers_is_explained(answer, said):
    def mine(**given):
        return answer

    with pytest.raises(ValueError, match=f"reward 'mine' .*{said}"):
        RewardFunctions([mine])(ASKED)


def test_an_error_in_a_users_function_is_named_with_its_place(tmp_path):
    for body, said in {
        "return [int(text[0]) for text in completions]": r"IndexError in .*mine\.py, line 3: string",
        "return (1 / 0 for _ in completions)": r"ZeroDivisionError in .*mine\.py, line 3",
        "sys.exit(0)": "SystemExit",
        "raise GeneratorExit": "GeneratorExit",
    }.items():
        with pytest.raises(RewardFailed, match=f"'f' failed with {said}"):
            in_file(tmp_path, f"import sys\ndef f(completions, **columns):\n    {body}")(ASKED)
    with pytest.raises(RewardFailed, match=r"failed with TypeError: .*unexpected keyword"):
        RewardFunctions([lambda completions, difficulty: []])(ASKED)


def test_each_of_our_rewards_takes_its_own_prompts_and_logs_its_components():
    score = RewardFunctions(["policy", "environment"], (1.0, 2.0))
    scores = score(batch_of([MOVE, PLAY], [RIGHT, "nonsense", " M: e2e4 E: 0.5 B: e2e4", "nonsense"]))
    assert scores.table.isnan().tolist() == [[True, False]] * 2 + [[False, True]] * 2
    perfect, bad_answer, best, bad_move = scores.rewards.tolist()
    assert perfect == 2.0 and best > 0.75 and bad_answer < 1 and bad_move < 0.2  # times the weight
    assert scores.components[0]["environment/fen_match"] == scores.components[2]["policy/best_move"] == 1.0
    assert all(name.startswith("policy/") for name in scores.components[3])


def test_replacing_groups_replaces_their_scores_and_rows_alone():
    score = RewardFunctions(["environment"])
    first = score(batch_of([MOVE, MOVE, MOVE], ["?"] * 6))
    merged = first.replace_groups([2, 0], score(batch_of([MOVE, MOVE], [RIGHT, "?", "?", RIGHT])), 2)
    assert (merged.rewards == 1.0).tolist() == [False, True, False, False, True, False]
    assert [row["environment/format"] for row in merged.components] == [0, 1, 0, 0, 1, 0]
    assert (first.rewards < 1).all()  # untouched
    merged = batch_of(OWN, ["a", "bcd", "ef", "g"]).replace_groups([1], batch_of([PLAY], ["hijklm", "n"]))
    assert merged.prompts == [OWN[0], PLAY] and merged.texts == ["a", "bcd", "hijklm", "n"]
    assert merged.lengths.tolist() == [1, 3, 6, 1] and len(merged.ids) == 11
    texts = ["".join(chr(c) for c in ids.tolist()) for ids in merged.by_row(merged.ids)]
    assert texts == merged.texts and merged.row_prompts == [OWN[0], OWN[0], PLAY, PLAY]


def test_judged_parts_of_our_own_rewards_add_up_to_the_reward():
    """A user's reward judges no field, and is no part of them."""
    answers = [RIGHT, "8/8+1.0", " M: e2e4 e1d2 E: 0.5 0.1 B: e2e4", " M: e1d2"]
    made, own = batch_of([MOVE, PLAY], answers), RewardFunctions(["environment", "policy"], [1.0, 2.0])
    scores = own(made)
    parts = list(own.judged(scores, answers))
    assert torch.allclose(sum(part.values for part in parts), scores.rewards)
    best = next(part for part in parts if part.char_spans[2] == (answers[2].index("B:"), 32))
    assert best.values.tolist() == pytest.approx([0, 0, 2 * 4 / 8.5, 0])
    assert best.char_spans[3] == (0, len(" M: e1d2"))  # without that field, all of it
    mine = RewardFunctions([brevity])
    assert list(mine.judged(mine(made), answers)) == []


def change() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    os.umask(0o777)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(7)
    sys.path.insert(0, "/nowhere")
    for number in (signal.SIGINT, signal.SIGALRM):
        signal.signal(number, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.2)


def state_of_the_process() -> tuple:
    mask = os.umask(0)
    os.umask(mask)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    timer, path = signal.getitimer(signal.ITIMER_REAL), list(sys.path)
    return os.getcwd(), mask, handlers, timer, torch.get_default_dtype(), torch.get_num_threads(), path


def test_what_a_reward_changes_of_the_process_is_put_back(tmp_path, monkeypatch):
    """Whoever changes it, and however that ends; but a file may change where it looks for what it imports."""

    def plain(completions, **columns):
        change()
        return [1.0] * len(completions)

    async def waiting(completions, **columns):
        os.chdir("/")
        return [1.0] * len(completions)

    def failing(**columns):
        change()
        raise RuntimeError("at once")

    monkeypatch.setattr(sys, "path", list(sys.path))
    before = state_of_the_process()
    for reward in (plain, waiting, failing):
        with pytest.raises(RewardFailed, match="at once") if reward is failing else nullcontext():
            RewardFunctions([reward])(ASKED)
        assert state_of_the_process() == before
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "later.py").write_text("SCORES = [2.0, 3.0]")
    source = f"import os, signal, sys, tempfile\nimport torch\n\n{inspect.getsource(change)}\nchange()\n"
    source += f"sys.path.insert(0, '{tmp_path / 'elsewhere'}')\ndef f(**columns):\n    import later\n"
    judge = in_file(tmp_path, source + "    return later.SCORES")
    assert state_of_the_process()[:-1] == before[:-1]
    assert judge(batch_of(OWN, ["a", "b"])).rewards.tolist() == [2, 3]
