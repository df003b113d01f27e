"""Held-out quality before and after: the paired changes, in words, as a table and as boards."""

import io

import numpy as np
import pytest
from rich.console import Console

from grpo.evaluate import Evaluation
from grpo.evaluate.boards import example_boards
from grpo.evaluate.quality import Change, Example, Quality, changes, examples, in_words, load, save
from grpo.evaluate.tables import change_table
from grpo.types import Prompt

KINGS = "8/8/8/3k4/8/3K4/8/7R w - - 0 1"


def evaluation(**columns: list[float]) -> Evaluation:
    named = {name.replace("__", "/"): np.array(values, float) for name, values in columns.items()}
    return Evaluation(named, dict.fromkeys(named, "the same"))


def shown(what: object, width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), markup=False)
    console.print(what)
    return console.file.getvalue()


@pytest.fixture
def before_and_after() -> tuple[Quality, Quality]:
    """Legal moves rise by 25 of 100, the next state falls, the reward stays; greedy nothing moves."""
    still = evaluation(reward=[0.5] * 100, policy__legal=[1.0] * 100)
    before = evaluation(reward=[0.5] * 100, policy__legal=[0.5] * 100, environment__next_state=[1.0] * 100)
    after = evaluation(
        reward=[0.5] * 100, policy__legal=[0.5] * 50 + [1.0] * 50, environment__next_state=[0.5] * 100
    )
    return Quality(before, still), Quality(after, still)


def test_changes_are_paired_and_in_hundredths(before_and_after):
    found = changes(*before_and_after)
    named = {(each.mode, each.name): each for each in found}
    legal = named["sampled", "a legal move"]
    assert (legal.before, legal.after, legal.change, legal.verdict) == (50, 75, 25, "better")
    assert 15 < legal.low < 25 < legal.high < 35
    assert named["sampled", "the next state, exactly"].verdict == "worse"
    assert named["greedy", "reward"].verdict == "open"
    assert ("greedy", "the next state, exactly") not in named


def test_it_is_said_what_improved_and_what_did_not(before_and_after):
    assert in_words(changes(*before_and_after)) == [
        "Sampled, better: a legal move (+25.0); worse: the next state, exactly (-50.0); too close to tell: "
        "reward (+0.0).",
        "Greedy, worse: nothing; too close to tell: reward (+0.0), a legal move (+0.0).",
    ]


def test_the_table_fits_a_terminal_and_has_no_markup(before_and_after):
    text = shown(change_table(changes(*before_and_after), num_prompts=200))
    assert max(map(len, text.splitlines())) <= 80 and "[" not in text
    assert "a legal move" in text and "+25.0" in text and "200 prompts" in text


def test_what_is_saved_is_what_is_shown(before_and_after, tmp_path):
    assert load(tmp_path) == ([], [])
    given = [Example("P: x", "one", "two")]
    save(tmp_path, *before_and_after, given)
    assert load(tmp_path) == (changes(*before_and_after), given)
    (tmp_path / "before-after" / "after-greedy.json").write_text("{")
    with pytest.raises(ValueError, match=r"after-greedy\.json is no saved evaluation"):
        load(tmp_path)
    (tmp_path / "before-after" / "examples.json").write_text('[{"prompt": 1}]')
    with pytest.raises(ValueError, match=r"examples\.json cannot be read"):
        load(tmp_path)


def test_examples_are_the_first_that_differ_of_either_task():
    prompts = [Prompt(str(i), f"{'P' if i < 4 else 'A'}: {i}", {"task": "policy" if i < 4 else "environment"})
               for i in range(8)]  # fmt: skip
    before, after = list("abcdefgh"), list("abXdeXXX")  # 2, 5, 6 and 7 differ
    chosen = examples(prompts, before, after)
    assert [(each.prompt, each.before, each.after) for each in chosen] == [
        ("P: 2", "c", "X"), ("A: 5", "f", "X"), ("A: 6", "g", "X"),
    ]  # fmt: skip
    assert examples(prompts, before, before) == []


@pytest.mark.parametrize(
    ("prompt", "before", "after", "said"),
    [
        (f"P: {KINGS}", " M: h1h5 E: 5.0 B: d3d5", " M: h1h5 E: 5.0 B: h1h5",
         ["White to move", "before: d3d5, which is illegal", "after:  Rh5+"]),
        (f"P: {KINGS}", " B: h1h1", " B: h1h8", ["before: h1h1, which is illegal", "after:  Rh8"]),
        (f"P: {KINGS}", "", " nonsense", ["before: no move can be read", "after:  no move can be read"]),
        (f"A: {KINGS}+h1h5+h1h5+", "8/8/8/3k4/8/3K4/8/7R b - - 1 1+0.001+0+0",
         "8/8/8/3k3R/8/3K4/8/8 b - - 1 1+0.001+0+0",
         ["White plays Rh5+", "before: wrong on h1, h5", "after:  right"]),
        (f"A: {KINGS}+h1h5+h1h5+", "8/8/8/3k3R/8/3K4/8/8 w - - 1 1+0.001+0+0", "?+0.001+0+0",
         ["before: the pieces right, not whose turn", "after:  no position: '?'"]),
        ("Say hello.", "hallo", "hello", ["Say hello.", "before: hallo", "after:  hello"]),
    ],
    ids=["move", "to itself", "no move", "position", "details", "another task"],
)  # fmt: skip
def test_boards_stand_beside_what_the_model_said(prompt, before, after, said):
    text = shown(example_boards(Example(prompt, before, after)), width=110)
    assert all(words in text for words in said), text
    if "A:" in prompt or "P:" in prompt:
        assert "♔" in text or "♚" in text


def test_a_change_of_chance_is_open():
    assert Change("greedy", "x", 1.0, 2.0, 1.0, -0.5, 2.5).verdict == "open"
