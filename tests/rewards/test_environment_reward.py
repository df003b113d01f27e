"""The environment reward, worked out by hand, component by component."""

import random

import chess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards.weighted
from rewards import REWARDS
from rewards.environment import EnvironmentReward, Outcome, referee

START = chess.STARTING_FEN
AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
PROMPT = f"A: {START}+e2e4+e2e4+"
COMPLETION = f"{AFTER_E4}+0.001+0+0"
COPY = f"{START}+0.001+0+0"
environment, sparse, gain = (
    REWARDS[name] for name in ("environment", "environment-sparse", "environment-gain")
)


def score(
    completion: str, *, reward: EnvironmentReward = environment, fen: str = START, action: str = "e2e4"
):
    """(components, reward) of one completion."""
    prompt = f"A: {fen}+{action}+{action}+"
    (row,) = reward.components([prompt], [completion], fen=[fen], action=[action], history=[[action]])
    (total,) = reward(
        prompts=[prompt], completions=[completion], completion_ids=[[1]], fen=[fen], action=[action]
    )
    return row, total


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(rewards.weighted, "_said", set())


# ------------------------------------------------------------------------------------------- referee


@pytest.mark.parametrize(
    ("fen", "action", "outcome"),
    [
        (START, "e2e4", Outcome(AFTER_E4, 0.001, False, False)),
        (START, "e2e5", Outcome(START, -1.0, False, True)),
        (START, "e7e5", Outcome(START, -1.0, False, True)),  # not White's
        (START, "0000", Outcome(START, -1.0, False, True)),
        (START, "P@e4", Outcome(START, -1.0, False, True)),
        (START, "hello", Outcome(START, -1.0, False, True)),
        (START, "", Outcome(START, -1.0, False, True)),
        (
            "6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1",
            "a1a8",
            Outcome("R5k1/5ppp/8/8/8/8/8/4K3 b - - 1 1", 1.0, True, False),
        ),
        (
            "k7/8/1K6/8/8/8/8/2Q5 w - - 0 1",
            "c1c7",  # stalemate
            Outcome("k7/2Q5/1K6/8/8/8/8/8 b - - 1 1", 0.5, True, False),
        ),
        (
            "8/8/4k3/8/8/3pK3/8/8 w - - 0 1",
            "e3d3",  # two bare kings
            Outcome("8/8/4k3/8/8/3K4/8/8 b - - 0 1", 0.5, True, False),
        ),
        (
            "8/P6k/8/8/8/8/8/K7 w - - 0 1",
            "a7a8q",
            Outcome("Q7/7k/8/8/8/8/8/K7 b - - 0 1", 0.001, False, False),
        ),
        # The en-passant square is written only where a capture there is legal.
        (
            "4k3/8/8/8/3p4/8/4P3/4K3 w - - 0 1",
            "e2e4",
            Outcome("4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1", 0.001, False, False),
        ),
    ],
)
def test_the_referee(fen: str, action: str, outcome: Outcome):
    assert referee(fen, action) == outcome


@given(st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_the_referee_takes_any_board_and_any_move(seed: int):
    rng = random.Random(seed)
    board = chess.Board(None)
    for square in rng.sample(chess.SQUARES, rng.randint(0, 12)):
        board.set_piece_at(square, chess.Piece(rng.randint(1, 6), rng.random() < 0.5))
    board.turn = rng.random() < 0.5
    for move in [*list(board.legal_moves)[:10], chess.Move(*rng.sample(chess.SQUARES, 2))]:
        outcome = referee(board.fen(), move.uci())
        assert outcome.reward in (0.001, 1.0, 0.5, -1.0)
        assert outcome.truncated == (move not in board.legal_moves)
        answer = f"{outcome.next_fen}+{outcome.reward}+{int(outcome.terminated)}+{int(outcome.truncated)}"
        for reward in (environment, sparse, gain):
            assert score(answer, reward=reward, fen=board.fen(), action=move.uci())[1] == 1.0


# ------------------------------------------------------------------------------------------- by hand


def test_the_published_line_is_perfect():
    row, total = score(COMPLETION)
    assert row == {"format": 1.0, "fen_match": 1.0, "game_state": 1.0, "reward_value": 1.0}
    assert total == 1.0
    assert score(COMPLETION, reward=sparse) == ({"exact": 1.0}, 1.0)
    assert score(COMPLETION, reward=gain)[0] == {
        "format": 1.0,
        "fen_gain": 1.0,
        "game_state": 1.0,
        "reward_value": 1.0,
    }


def test_what_copying_the_position_earns():
    # From the old FEN (56 characters) to the new (58): 8 -> 4P3 three edits, P -> 1, w -> b: 5 in all.
    row, total = score(COPY)
    assert row["fen_match"] == pytest.approx(53 / 58)
    assert total == pytest.approx((4 + 3 * 53 / 58 + 2 + 1) / 10) and total > 0.97  # nearly everything
    assert score(COPY, reward=sparse)[1] == 0.0
    assert score(COPY, reward=gain)[0]["fen_gain"] == 0.0
    assert score(COPY, reward=gain)[1] == pytest.approx(0.7)


def test_what_half_the_change_earns():
    # The side to move still wrong: one edit of 58 left, where copying leaves five.
    half = COMPLETION.replace(" b ", " w ")
    assert score(half)[0]["fen_match"] == pytest.approx(57 / 58)
    assert score(half, reward=gain)[0]["fen_gain"] == pytest.approx(4 / 5)
    # Further away than the copy is 0, not below.
    assert score("8/8/8/8/8/8/8/8 w - - 0 1+0.001+0+0", reward=gain)[0]["fen_gain"] == 0.0


def test_an_illegal_move_leaves_the_position_and_gain_is_exact_or_nothing():
    right = f"{START}+-1.0+0+1"
    for reward in (environment, sparse, gain):
        assert score(right, reward=reward, action="e2e5")[1] == 1.0
    wrong = f"{AFTER_E4}+-1.0+0+1"
    assert score(wrong, reward=gain, action="e2e5")[0]["fen_gain"] == 0.0
    assert score(wrong, reward=environment, action="e2e5")[0]["fen_match"] == pytest.approx(53 / 58)


@pytest.mark.parametrize(
    ("value", "earned", "all_right"),
    [
        ("0.001", 1.0, 1.0),
        ("0.0010", 1.0, 1.0),
        ("0.0", 1.0, 0.0),
        ("0.101", 1.0, 0.0),  # 0.1 away
        ("0.102", 0.5, 0.0),
        ("0.301", 0.5, 0.0),  # 0.3 away
        ("0.302", 0.0, 0.0),
        ("-0.099", 1.0, 0.0),
        ("1.0", 0.0, 0.0),
        ("nan", 0.0, 0.0),
        ("inf", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_reward_value(value: str, earned: float, all_right: float):
    text = f"{AFTER_E4}+{value}+0+0"
    assert score(text)[0]["reward_value"] == earned
    assert score(text, reward=sparse)[1] == all_right


@pytest.mark.parametrize(("value", "earned"), [("1.1", 1.0), ("1.11", 0.5), ("0.7", 0.5), ("0.69", 0.0)])
def test_the_edges_of_reward_value_belong_to_it(value: str, earned: float):
    text = f"R5k1/5ppp/8/8/8/8/8/4K3 b - - 1 1+{value}+1+0"
    row, _ = score(text, fen="6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1", action="a1a8")
    assert row == {"format": 1.0, "fen_match": 1.0, "game_state": 1.0, "reward_value": earned}


@pytest.mark.parametrize(
    ("flags", "earned"), [("0+0", 1.0), ("1+0", 0.5), ("0+1", 0.5), ("1+1", 0.0), ("0", 0.5), ("x+y", 0.0)]
)
def test_game_state(flags: str, earned: float):
    text = f"{AFTER_E4}+0.001+{flags}"
    assert score(text)[0]["game_state"] == earned
    assert score(text, reward=sparse)[1] == float(earned == 1.0)


def test_a_fifth_field_costs_the_format_and_exactness():
    text = COMPLETION + "+0"
    row, total = score(text)
    assert row == {"format": 0.0, "fen_match": 1.0, "game_state": 1.0, "reward_value": 1.0}
    assert total == pytest.approx(0.6)
    assert score(text, reward=sparse)[1] == 0.0


# ---------------------------------------------------------------------------------- calling convention


def test_the_prompt_is_read_where_the_columns_are_missing():
    assert environment([PROMPT], [COMPLETION]) == [1.0]
    assert environment([PROMPT], [COMPLETION], fen=[None], action=[None], history=[None]) == [1.0]
    assert environment(["A: x+e2e4+"], [COMPLETION], fen=[START], action=["e2e4"]) == [1.0]
    assert environment([PROMPT], [COMPLETION], action=["d2d4"])[0] < 1.0


def test_prompts_of_others_get_none():
    prompts = [f"P: {START}", PROMPT, "", PROMPT]
    assert environment(prompts, ["", COMPLETION, COMPLETION, ""]) == [None, 1.0, None, 0.0]
    assert environment([[{"role": "user", "content": PROMPT}]], [[{"content": COMPLETION}]]) == [1.0]


@pytest.mark.parametrize("prompt", ["A:", "A: ", "A: nonsense", "A: 9/9+e2e4+e2e4+", "A:+++"])
def test_a_prompt_without_a_position_leaves_the_format(prompt: str):
    assert environment.components([prompt], [COMPLETION]) == [{"format": 1.0}]
    assert environment([prompt], [COMPLETION]) == [1.0]
    assert sparse([prompt], [COMPLETION]) == [None]


def test_names_and_weights():
    assert {name: reward.__name__ for name, reward in REWARDS.items()} == {name: name for name in REWARDS}
    assert set(REWARDS) == {
        "policy", "policy-best", "policy-legal", "environment", "environment-sparse", "environment-gain",
    }  # fmt: skip
    assert environment.weights == {"format": 4.0, "fen_match": 3.0, "game_state": 2.0, "reward_value": 1.0}
    with pytest.raises(ValueError, match=r"\['best_move'\].*fen_match"):
        environment.with_weights({"best_move": 1.0})
    both = environment.with_weights({"fen_gain": 3.0, "fen_match": 0.0})
    assert score(COPY, reward=both)[1] == pytest.approx(0.7)


# ----------------------------------------------------------------------------------------- malformed

MALFORMED = [
    *(COMPLETION[:end] for end in range(len(COMPLETION))),
    *(COMPLETION[start:] for start in range(1, len(COMPLETION))),
    "",
    "+",
    "+++",
    "+" * 10_000,
    "x" * 10_000,
    f"{AFTER_E4}+0.001+0+0+0+0",
    "8/8/8/8/8/8/8/8 w - - 0 1+0.001+0+0",
    "9/9/9/9/9/9/9/9 w - - 0 1+0.001+0+0",
    f"{AFTER_E4}+nan+0+0",
    f"{AFTER_E4}+1e999+0+0",
    f"{AFTER_E4}+0.001+0+٠",
    f"{AFTER_E4}+٠.٠٠١+0+0",
    f"{AFTER_E4}\x00+0.001+0+0",
    "♔♕♖ \ud800",
]


@pytest.mark.parametrize("reward", [environment, sparse, gain], ids=lambda reward: reward.__name__)
def test_malformed_texts_get_a_score_below_one_and_no_exception(reward):
    for text in MALFORMED:
        row, total = score(text, reward=reward)
        assert set(row) == set(reward.weights) and all(0 <= value <= 1 for value in row.values())
        assert 0 <= total < 1, text
        if reward is sparse:
            assert total == 0.0


alphabet = st.sampled_from("+ /0123456789abcdefghKQRBNPkqrbnpw-.٣\x00")


@given(
    st.text(alphabet, max_size=100)
    | st.text(max_size=100)
    | st.text(alphabet, max_size=5).map(COMPLETION.__add__)
)
@settings(max_examples=200, deadline=None)
def test_any_text_gets_a_score_and_only_the_right_fen_matches_fully(text: str):
    row, total = score(text)
    assert 0 <= total <= 1 and all(0 <= value <= 1 for value in row.values())
    assert (row["fen_match"] == 1.0) == (text.split("+")[0].strip() == AFTER_E4)
    assert score(text, reward=sparse)[1] in (0.0, 1.0)
