import math
import os
import signal
import sys

import pytest
import torch

import rewards as rewards_package
from grpo.data.reward_calls import RewardFailed
from grpo.data.reward_files import load_reward
from grpo.data.reward_functions import RewardFunctions
from grpo.run.metrics import reward_metrics
from grpo.types import Prompt, Rollout
from rewards.formats import environment_prompt, policy_prompt

FEN = "8/8/8/4k3/8/8/4P3/4K3 w - - 0 1"
NEXT = "8/8/8/4k3/4P3/8/8/4K3 b - - 0 1"
MOVE = Prompt("m:1", environment_prompt(FEN, "e2e4", ["e2e4"]),
              {"task": "environment", "fen": FEN, "action": "e2e4", "history": ["e2e4"]})  # fmt: skip
PLAY = Prompt("p:1", policy_prompt(FEN),
              {"task": "policy", "fen": FEN, "moves": ["e2e4", "e1d2"], "evals": [0.5, 0.1]})  # fmt: skip
OWN = [Prompt(f"o:{i}", f"question {i}", {"task": "custom", "answer": i}) for i in range(2)]


def rollout_of(prompts, completions) -> Rollout:
    """Completions of one token a letter, its code point the token."""
    lengths = torch.tensor([len(text) for text in completions])
    ids = torch.zeros(len(completions), max(1, int(lengths.max())), dtype=torch.long)
    for row, text in enumerate(completions):
        ids[row, : len(text)] = torch.tensor([ord(letter) for letter in text])
    zeros = torch.zeros(ids.shape)
    return Rollout(
        prompts,
        [[1] for _ in prompts],
        ids,
        lengths,
        torch.ones(len(lengths), dtype=bool),
        zeros,
        completions,
    )


def functions(folder, source: str, *specs: str, weights=()) -> RewardFunctions:
    path = folder / "mine.py"
    path.write_text(source)
    return RewardFunctions([f"{path}:{spec}" for spec in specs], weights)


# ------------------------------------------------------------------------------------ a user's reward

LENGTHS = """
def brevity(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]

def right(completions, answer, **kwargs):
    return [1 if completion == str(a) else None for completion, a in zip(completions, answer)]
"""


NEEDY = """
def brevity(prompts, completions, limit, **columns): ...
def two(completions, *, limit, colour, completion_ids, answer, **columns): ...
def content(completions, answer, *others, limit=3, **columns): ...
class Callable:
    def __call__(self, completions, limit, **columns): ...
callable_one = Callable()
"""


CLOSED = """
def closed(prompts, completions): ...
def all_by_name(prompts, completions, completion_ids, task, answer): ...
def without_ids(prompts, completions, *, task=None, answer=None): ...
"""


def test_a_reward_that_does_not_take_what_it_is_given_is_refused_beforehand(tmp_path):
    with pytest.raises(
        ValueError, match=r"'closed' does not take answer, completion_ids, task, .* add \*\*col"
    ):
        functions(tmp_path, CLOSED, "closed").check((), OWN)
    with pytest.raises(ValueError, match="'without_ids' does not take completion_ids, which"):
        functions(tmp_path, CLOSED, "all_by_name", "without_ids").check((), [])
    functions(tmp_path, CLOSED, "all_by_name").check((), OWN)


def test_a_column_that_no_prompt_has_is_missed_beforehand(tmp_path):
    with pytest.raises(ValueError, match="'brevity' needs the column limit; the prompts have task, answer:"):
        functions(tmp_path, NEEDY, "brevity").check((), OWN)
    with pytest.raises(ValueError, match=r"'two' needs the columns limit, colour; .* give --prompts with it"):
        functions(tmp_path, NEEDY, "content", "two").check((), OWN)
    with pytest.raises(ValueError, match="'callable_one' needs the column limit"):
        functions(tmp_path, NEEDY, "callable_one").check((), OWN)
    functions(tmp_path, NEEDY, "content").check((), OWN)
    functions(tmp_path, NEEDY, "brevity", "two").check((), [])  # a stream: nothing is known of it
    some = [*OWN, Prompt("o:3", "question", {"limit": 3, "colour": "red"})]  # None for the others
    functions(tmp_path, NEEDY, "brevity", "two").check((), some)
    RewardFunctions(["policy", "environment"]).check((), OWN)


def test_a_users_file_scores_with_weights_and_none_means_not_mine(tmp_path):
    """Question 0 is answered "0" and "12", question 1 "1" and "": 0.5 a letter off, 3 if right."""
    score = functions(tmp_path, LENGTHS, "brevity", "right", weights=(0.5, 3.0))
    scores = score(rollout_of(OWN, ["0", "12", "1", ""]))
    assert scores.names == ("brevity", "right")
    expected = torch.tensor([[-1, 1], [-2, math.nan], [-1, 1], [0, math.nan]], dtype=torch.float64)
    assert torch.equal(scores.table.nan_to_num(99), expected.nan_to_num(99))
    assert scores.rewards.tolist() == [-0.5 + 3, -1.0, -0.5 + 3, 0.0]


def test_weights_are_as_many_as_rewards(tmp_path):
    with pytest.raises(ValueError, match="reward_weights has 1 numbers for 2 rewards: give one each"):
        functions(tmp_path, LENGTHS, "brevity", "right", weights=(1.0,))


def test_without_weights_each_counts_once(tmp_path):
    scores = functions(tmp_path, LENGTHS, "brevity", "right")(rollout_of(OWN, ["0", "12", "1", ""]))
    assert scores.rewards.tolist() == [0.0, -2.0, 0.0, 0.0]


def test_a_row_that_no_function_scores_is_an_error_in_training_and_nan_in_evaluation(tmp_path):
    scores = functions(tmp_path, LENGTHS, "right")(rollout_of(OWN, ["0", "12", "1", ""]))
    with pytest.raises(ValueError, match=r"No reward function scored row 1 \(2 of 4 rows\)"):
        _ = scores.rewards
    assert scores.rewards_where_scored.nan_to_num(99).tolist() == [1.0, 99.0, 1.0, 99.0]


def test_it_is_called_as_trl_calls_it(tmp_path):
    """prompts and completions as text, completion_ids without padding, columns a list each, by name."""
    source = """
seen = {}
def spy(prompts, completions, completion_ids, **columns):
    seen.update(columns, prompts=prompts, completions=completions, completion_ids=completion_ids)
    return [0.0] * len(prompts)
"""
    functions(tmp_path, source, "spy")(rollout_of(OWN, ["a", "bcd", "", "e"]))
    seen = sys.modules["reward_file_mine"].seen
    assert seen["prompts"] == ["question 0", "question 0", "question 1", "question 1"]
    assert seen["completions"] == ["a", "bcd", "", "e"]
    assert seen["completion_ids"] == [[97], [98, 99, 100], [], [101]]
    assert seen["answer"] == [0, 0, 1, 1]


BROKEN = """
def first_digit(completions, **kwargs):
    return [int(text[0]) for text in completions]

def wants_more(completions, difficulty):
    return [0.0] * len(completions)
"""


def test_an_error_in_a_users_function_is_named_with_its_place(tmp_path):
    with pytest.raises(
        RewardFailed, match=r"'first_digit' failed with ValueError in .*mine\.py, line 3: inv"
    ):
        functions(tmp_path, BROKEN, "first_digit")(rollout_of(OWN, ["x"] * 4))
    with pytest.raises(RewardFailed, match=r"'wants_more' failed with TypeError: .*unexpected keyword"):
        functions(tmp_path, BROKEN, "wants_more")(rollout_of(OWN, ["x"] * 4))


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[1.0] * 3", r"reward 'f' returned 3 scores for 4 completions: it must return a list of 4"),
        ("[]", r"reward 'f' returned 0 scores for 4 completions"),
        ("None", r"reward 'f' returned 'None' .*: it must return a list of 4"),
        ("0.5", r"reward 'f' returned '0.5' .*: it must return a list of 4"),
        ("['good'] * 4", r"reward 'f' returned .*good.*: it must return a list of 4, one number, or None"),
        ("[1.0, float('nan')] * 2", r"reward 'f' returned NaN for completion 1: .* or None for what it does"),
        ("[[1.0]] * 4", r"reward 'f' returned .*: it must return a list of 4"),
    ],
)
def test_what_is_no_list_of_numbers_is_explained(tmp_path, returned, message):
    score = functions(tmp_path, f"def f(**kwargs):\n    return {returned}\n", "f")
    with pytest.raises(ValueError, match=message):
        score(rollout_of(OWN, ["a"] * 4))


@pytest.mark.parametrize(
    "returned",
    ["(1, 0, True, None)", "numpy.array([1.0, 0, 1, 9])", "torch.tensor([1.0, 0, 1, 9])"],
)
def test_other_sequences_of_numbers_will_do(tmp_path, returned):
    score = functions(tmp_path, f"import numpy, torch\ndef f(**kwargs):\n    return {returned}\n", "f")
    table = score(rollout_of(OWN, ["a"] * 4)).table
    assert table.nan_to_num(9).flatten().tolist() == [1.0, 0.0, 1.0, 9.0]


TOLD = """
import asyncio, functools

def told(completions, trainer_state, log_metric, log_extra, **columns):
    log_extra("letters", [len(text) for text in completions])
    log_metric("asked", trainer_state.global_step)
    log_metric("asked", trainer_state.max_steps)
    return [1.0] * len(completions)

def plain(prompts, completions, completion_ids, task, answer):
    return [1.0] * len(completions)

def wrong(completions, log_extra, **columns):
    log_extra("letters", [1])
"""


def test_what_a_reward_logs_and_what_it_is_told_of_the_run(tmp_path):
    score = functions(tmp_path, TOLD, "told", "plain")  # which takes none of it
    score.check((), OWN)
    score.state.global_step, score.state.max_steps = 3, 5
    scores = score(rollout_of(OWN, ["a", "bcd", "", "e"]))
    assert scores.extra == [{"letters": 1}, {"letters": 3}, {"letters": 0}, {"letters": 1}]
    assert scores.metrics == {"asked": [3.0, 5.0]} and reward_metrics(scores, 2)["asked"] == 4
    joined = type(scores).join([scores, scores])
    assert len(joined.extra) == 8 and joined.metrics == {"asked": [3.0, 5.0, 3.0, 5.0]}
    other = score(rollout_of(OWN[:1], ["xyz", ""]))
    assert scores.replace_groups([1], other, 2).extra == [*scores.extra[:2], {"letters": 3}, {"letters": 0}]
    with pytest.raises(RewardFailed, match=r"log_extra\('letters'\) got 1 values for 4 completions"):
        functions(tmp_path, TOLD, "wrong")(rollout_of(OWN, ["a"] * 4))


ASYNC = """
import asyncio, functools
met, loops = asyncio.Event(), set()

async def first(completions, **columns):
    await asyncio.wait_for(met.wait(), 20)  # which the second sets: they are awaited together
    loops.add(asyncio.get_running_loop())
    return [1.0] * len(completions)

class Second:
    async def __call__(self, completions, log_metric, **columns):
        met.set()
        log_metric("second", 7)
        return (None if text == "no" else 2.0 for text in completions)

second = Second()
half = functools.partial(first, half=True)

async def broken(completions, **columns):
    raise KeyError("gone")
"""


def test_coroutine_functions_are_awaited_together(tmp_path):
    score = functions(tmp_path, ASYNC, "first", "second", "half")
    for _ in range(2):  # in one loop, which clients that are kept open want
        scores = score(rollout_of(OWN, ["a", "no", "b", "c"]))
    assert scores.rewards.tolist() == [4.0, 2.0, 4.0, 4.0] and scores.metrics == {"second": [7.0]}
    assert len(sys.modules["reward_file_mine"].loops) == 1
    with pytest.raises(RewardFailed, match=r"'broken' failed with KeyError in .*mine\.py, line 20: 'gone'"):
        functions(tmp_path, ASYNC, "first", "broken")(rollout_of(OWN, ["a"] * 4))


def test_a_conversation_reaches_rewards_as_messages(tmp_path):
    asked = [{"role": "user", "content": "2 + 2?"}]
    talk = Prompt("t:1", "<user>2 + 2?<assistant>", {"task": "custom"}, asked)
    source = """
seen = []
def spy(prompts, completions, **columns):
    seen.extend(zip(prompts, completions))
    return [0.0] * len(prompts)
"""
    functions(tmp_path, source, "spy")(rollout_of([talk, OWN[0]], ["4", "5"]))
    assert sys.modules["reward_file_mine"].seen == [
        (asked, [{"role": "assistant", "content": "4"}]), ("question 0", "5"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------- loading


@pytest.mark.parametrize(
    ("source", "spec", "message"),
    [
        ("import no_such_module", "f", r"fails on import: ModuleNotFoundError\(.*no_such_module"),
        ("def f(:", "f", "fails on import: SyntaxError"),
        ("1 / 0", "f", "fails on import: ZeroDivisionError"),
        ("def g(**k): pass\ndef h(**k): pass", "f", "has no function 'f'; it has g, h"),
        ("f = 3\ndef g(**k): pass", "f", "has no function 'f'; it has g"),
    ],
)
def test_a_file_that_cannot_serve_says_why(tmp_path, source, spec, message):
    with pytest.raises(ValueError, match=rf"^reward '.*mine.py:{spec}': .*{message}"):
        functions(tmp_path, source, spec)
    if "fails" in message:
        assert "reward_file_mine" not in sys.modules


def test_a_name_that_is_none_and_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"reward 'polcy' is not known: give one of policy, .*file.py:name"):
        load_reward("polcy")
    with pytest.raises(ValueError, match=r"there is no file '/no/such.py'"):
        load_reward("/no/such.py:f")
    (tmp_path / "a.txt").write_text("def f(): pass")
    with pytest.raises(ValueError, match="is not a Python file"):
        load_reward(f"{tmp_path}/a.txt:f")


def test_a_users_file_may_have_the_name_of_a_module(tmp_path):
    """rewards.py is the obvious name for a file of rewards, and ours is called so, too."""
    (tmp_path / "rewards.py").write_text("def f(completions, **k):\n    return [2.0] * len(completions)\n")
    score = RewardFunctions([f"{tmp_path}/rewards.py:f", "policy"])
    assert sys.modules["rewards"] is rewards_package
    assert score(rollout_of([OWN[0]], ["a"])).rewards.tolist() == [2.0]


# ------------------------------------------------------------------------------------------ our own


def test_each_of_our_rewards_takes_its_own_prompts_and_logs_its_components():
    score = RewardFunctions(["policy", "environment"], (1.0, 2.0))
    answers = [f"{NEXT}+0.001+0+0", "nonsense"]
    scores = score(rollout_of([MOVE, PLAY], [*answers, " M: e2e4 E: 0.5 B: e2e4", "nonsense"]))
    assert scores.table.isnan().tolist() == [[True, False]] * 2 + [[False, True]] * 2
    assert scores.rewards[0] == 2.0 and scores.rewards[2] == 1.0  # perfect, times the weight
    assert scores.rewards[1] < 1 and scores.rewards[3] < 0.2
    assert scores.components[0]["environment/fen_match"] == 1.0
    assert scores.components[2]["policy/best_move"] == 1.0
    assert all(name.startswith("policy/") for name in scores.components[3])


def test_replacing_groups_replaces_their_scores_alone():
    score = RewardFunctions(["environment"])
    right, wrong = f"{NEXT}+0.001+0+0", "?"
    first = score(rollout_of([MOVE, MOVE, MOVE], [wrong] * 6))
    new = score(rollout_of([MOVE, MOVE], [right, wrong, wrong, right]))
    merged = first.replace_groups([2, 0], new, 2)
    assert (merged.rewards == 1.0).tolist() == [False, True, False, False, True, False]
    assert [row["environment/format"] for row in merged.components] == [0, 1, 0, 0, 1, 0]
    assert (first.rewards < 1).all()  # untouched


def test_replacing_groups_of_a_rollout_keeps_rows_together():
    first = rollout_of([OWN[0], OWN[1]], ["a", "bcd", "ef", "g"])
    new = rollout_of([PLAY], ["hijklm", "n"])
    merged = first.replace_groups([1], new)
    assert merged.prompts == [OWN[0], PLAY] and merged.completions == ["a", "bcd", "hijklm", "n"]
    assert merged.lengths.tolist() == [1, 3, 6, 1] and merged.completion_ids.shape == (4, 6)
    texts = ["".join(chr(c) for c in row[row > 0].tolist()) for row in merged.completion_ids]
    assert texts == merged.completions
    assert merged.row_prompts == [OWN[0], OWN[0], PLAY, PLAY]


# -------------------------------------------------------------------------- what its components judge


def test_judged_parts_of_our_own_rewards_add_up_to_the_reward(tmp_path):
    """A user's reward judges no field, and is no part of them."""
    made = rollout_of([MOVE, MOVE, PLAY, PLAY], [
        f"{NEXT}+0.001+0+0", "8/8+1.0", " M: e2e4 e1d2 E: 0.5 0.1 B: e2e4", " M: e1d2",
    ])  # fmt: skip
    own = RewardFunctions(["environment", "policy"], [1.0, 2.0])
    scores = own(made)
    parts = list(own.judged(scores, made.completions))
    assert torch.allclose(sum(part.values for part in parts), scores.rewards)
    best = next(part for part in parts if part.letters[2] == (made.completions[2].index("B:"), 32))
    assert best.values.tolist() == pytest.approx([0, 0, 2 * 4 / 8.5, 0])
    assert best.letters[3] == (0, len(" M: e1d2"))  # without that field, all of it
    mine = functions(tmp_path, "def f(completions, **columns):\n    return [1.0] * len(completions)", "f")
    assert list(mine.judged(mine(made), made.completions)) == []


# --------------------------------------------------------------------- rewards that do more than score

CHANGING = """
import os, signal, sys, tempfile
import torch

def _change():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)
    os.umask(0o777)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(7)
    sys.path.insert(0, "/nowhere")
    signal.signal(signal.SIGINT, lambda *_: None)
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.2)

def plain(completions, **columns):
    _change()
    return [1.0] * len(completions)

async def waiting(completions, **columns):
    import os
    os.chdir("/")
    return [1.0] * len(completions)

def failing(completions, **columns):
    _change()
    raise RuntimeError("at once")
"""


def state_of_the_process() -> tuple:
    mask = os.umask(0)
    os.umask(mask)
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)]
    timer = signal.getitimer(signal.ITIMER_REAL)
    return (
        os.getcwd(),
        mask,
        list(sys.path),
        handlers,
        timer,
        torch.get_default_dtype(),
        torch.get_num_threads(),
    )


@pytest.mark.parametrize("name", ["plain", "waiting", "failing"])
def test_what_a_reward_changes_of_the_process_is_put_back(tmp_path, name):
    judge = functions(tmp_path, CHANGING, name)
    before = state_of_the_process()
    try:
        judge(rollout_of(OWN, ["a", "b"]))
    except RewardFailed as error:
        assert name == "failing" and "at once" in str(error)
    assert state_of_the_process() == before


def test_a_file_may_change_where_it_looks_and_nothing_else(tmp_path):
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/later.py").write_text("SCORE = 2.0")
    source = (
        CHANGING
        + f"""
_change()
sys.path.insert(0, {str(tmp_path / "lib")!r})
def looking(completions, **columns):
    import later
    return [later.SCORE] * len(completions)
"""
    )
    before = state_of_the_process()
    judge = functions(tmp_path, source, "looking")
    after = state_of_the_process()
    assert (after[:2], after[3:]) == (before[:2], before[3:])
    assert judge(rollout_of(OWN, ["a", "b"])).rewards.tolist() == [2, 2]
    sys.path[:] = before[2]


POOLED = """
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from neighbour import half

def length(text):
    return half(len(text))

def pooled(completions, **columns):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return list(pool.map(length, completions))
"""


def test_a_reward_may_import_its_neighbour_and_start_processes(tmp_path, monkeypatch):
    """Which import its file by its name, whatever the folder that the run was started in."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "neighbour.py").write_text("def half(number):\n    return number / 2\n")
    (tmp_path / "pooled_rewards.py").write_text(POOLED)
    judge = RewardFunctions([f"{tmp_path / 'pooled_rewards.py'}:pooled"])
    assert judge(rollout_of(OWN, ["a", "bcd"])).rewards.tolist() == [0.5, 1.5]


def test_a_file_called_as_a_module_that_is_there_does_not_take_its_place(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("random.py", "rewards.py"):
        (tmp_path / name).write_text(
            "def one(completions, **columns):\n    return [1.0] * len(completions)\n"
        )
        judge = RewardFunctions([f"{tmp_path / name}:one"])
        assert judge(rollout_of(OWN, ["a", "b"])).rewards.tolist() == [1, 1]
    import random

    assert random.random() < 1 and sys.modules["rewards"] is rewards_package
