"""Which completions a report shows, and the boards it draws of them."""

import re
from dataclasses import replace

import pytest
from report_folders import FEN, NEXT_FEN, completion

from grpo.workbench.report.boards import BAD, GOOD, draw_boards
from grpo.workbench.report.gallery import chosen
from grpo.workbench.report.read import Run

ASKED = f"A: {FEN}+a4a5+a4a5+"


@pytest.mark.parametrize(
    ("prompt", "text", "boards", "arrow", "words"),
    [
        pytest.param(f"P: {FEN}", "M: a4a5 E: 0.3 B: a4a5", 1, GOOD, "White to move: a5", id="legal"),
        pytest.param(f"P: {FEN}", "M: d4g8 E: 0.3 B: d4g8", 1, BAD, "d4g8 is illegal here", id="illegal"),
        pytest.param(f"P: {FEN}  ", "B: resign", 1, None, "No best move can be read", id="no move"),
        pytest.param(ASKED, f"{NEXT_FEN}+0.001+0+0", 2, GOOD, "predicted, right", id="right"),
        pytest.param(ASKED, f"{FEN}+0.001+0+0", 2, GOOD, "wrong on the red", id="wrong"),
        pytest.param(ASKED, NEXT_FEN.replace("b -", "w -"), 2, GOOD, "in a field", id="turn"),
        pytest.param(f"A: {FEN}+a4b7+a4b7+", f"{FEN}+-1.0+0+1", 2, BAD, "which is illegal", id="truncated"),
        pytest.param(ASKED, "8/8", 1, GOOD, "No next position can be read", id="none"),
        pytest.param("Say hello", "hello", 0, None, "", id="no chess"),
        pytest.param("P: no position", "B: a4a5", 0, None, "", id="no position"),
        pytest.param("A: +++", "", 0, None, "", id="empty fields"),
    ],
)  # fmt: skip
def test_boards(prompt, text, boards, arrow, words):
    drawn = draw_boards(prompt, text, "x")
    assert len(drawn.boards) == boards
    assert set(re.findall(r'<line[^>]*stroke="(#\w+)"', " ".join(b.svg for b in drawn.boards))) == (
        {arrow} if arrow else set()
    )
    assert words in " ".join([*(board.caption for board in drawn.boards), drawn.remark])


def test_wrong_squares_are_red():
    """The pawn is still on a4 and not on a5."""
    right, wrong = (draw_boards(ASKED, f"{fen}+0.001+0+0", "x").boards[1].svg for fen in (NEXT_FEN, FEN))
    assert right.count("#e8a39b") == 0 and wrong.count("#e8a39b") == 2


def test_the_gallery_holds_the_best_and_the_worst_of_each_task():
    records = [completion(9, f"policy {n}", prompt=f"P: {n}", reward=n / 100) for n in range(20)]
    records += [completion(9, f"answer {n}", prompt=f"{ASKED}{n}", reward=n / 100) for n in range(20)]
    records += records[:3]  # the same text again
    picked = chosen(Run("r", {}, [], [], records, [], {}, []), 12)
    assert [each["completion"] for each in picked] == [
        *(f"policy {n}" for n in (19, 18, 17, 2, 1, 0)), *(f"answer {n}" for n in (19, 18, 17, 2, 1, 0)),
    ]  # fmt: skip


def test_rewards_are_weighed_as_the_run_weighed_them():
    one = {"prompt": "a", "completion": "x", "rewards": {"brevity": 1.0, "letter": 0.0}}
    other = {"prompt": "b", "completion": "y", "rewards": {"brevity": 0.0, "letter": 0.9}}
    settings = {"reward": ["my.py:brevity", "my.py:letter"], "reward_weights": [1.0, 2.0]}
    run = Run("r", settings, [], [], [one, other], [], {}, [])
    assert chosen(run, 2) == [other, one]
    assert chosen(replace(run, settings={}), 2) == [one, other]
