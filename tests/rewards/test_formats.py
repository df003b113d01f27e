"""The two texts: what is written is read back, and nothing a model can write raises."""

import random

import chess
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_lines import parse_line

from rewards.formats import (
    PADDED,
    UNPADDED,
    EnvironmentSample,
    PolicySample,
    environment_line,
    environment_prompt,
    is_fen,
    is_move,
    parse_environment_completion,
    parse_number,
    parse_policy_completion,
    policy_line,
    policy_prompt,
)

ROOK_ENDING = "8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56"
MOVES = ("a4a5", "d4c4", "a6g6", "a6a8", "d4c5")
POLICY = PolicySample(ROOK_ENDING, MOVES, (0.0,) * 5, "d4c5")
POLICY_LINE = f"P: {ROOK_ENDING} M: a4a5 d4c4 a6g6 a6a8 d4c5 E: 0.0 0.0 0.0 0.0 0.0 B: d4c5"
AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
ENVIRONMENT = EnvironmentSample(
    chess.STARTING_FEN, "e2e4", ("e2e4",), AFTER_E4, 0.001, terminated=False, truncated=False
)
ENVIRONMENT_LINE = f"A: {chess.STARTING_FEN}+e2e4+e2e4+{AFTER_E4}+0.001+0+0"


def test_the_published_lines_are_read_and_written():
    padded = f"P: {ROOK_ENDING:90}M: {' '.join(MOVES):30}E: {'0.0 0.0 0.0 0.0 0.0':40}B: d4c5"
    assert parse_line(padded) == parse_line(POLICY_LINE) == POLICY
    assert policy_line(POLICY, widths=PADDED) == padded
    assert policy_line(POLICY, widths=UNPADDED) == POLICY_LINE
    assert parse_line(ENVIRONMENT_LINE) == ENVIRONMENT
    assert environment_line(ENVIRONMENT) == ENVIRONMENT_LINE


def test_prompts():
    assert policy_prompt(ROOK_ENDING) == f"P: {ROOK_ENDING}"
    assert policy_prompt(ROOK_ENDING, trailing_space=True) == f"P: {ROOK_ENDING} "
    history = [f"a{i}a{i + 1}" for i in range(1, 8)] * 2
    assert environment_prompt("fen", "a7a8", history) == f"A: fen+a7a8+{' '.join(history[-10:])}+"


@given(st.integers(0, 10**6), st.booleans())
@settings(max_examples=40, deadline=None)
def test_lines_of_random_play_survive_the_round_trip(seed: int, padded: bool):
    rng = random.Random(seed)
    board = chess.Board()
    for _ in range(rng.randint(0, 60)):
        if board.is_game_over():
            return
        board.push(rng.choice(list(board.legal_moves)))
    moves = [move.uci() for move in board.legal_moves][:5]
    if not moves:
        return
    evals = tuple(round(rng.uniform(-1000, 1000), rng.randint(0, 3)) for _ in moves)
    policy = PolicySample(board.fen(), tuple(moves), evals, rng.choice(moves))
    assert parse_line(policy_line(policy, widths=PADDED if padded else UNPADDED)) == policy
    action = rng.choice(moves)
    answer = EnvironmentSample(board.fen(), action, (action,), board.fen(), -1.0, False, True)
    assert parse_line(environment_line(answer)) == answer


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0.0", 0.0),
        ("-12", -12.0),
        ("+.5", 0.5),
        ("999.99", 999.99),
        ("1.", 1.0),
        ("nan", None),
        ("inf", None),
        ("-inf", None),
        ("1e5", None),
        ("1_0", None),
        ("٣", None),  # an Arabic-Indic three: float() would take it
        ("1.2.3", None),
        ("--1", None),
        ("", None),
        (".", None),
        ("1" * 400, None),  # float() would say inf
    ],
)
def test_numbers(text: str, number: float | None):
    assert parse_number(text) == number


def test_moves():
    assert is_move("e7e8q") and is_move("a1h8")
    assert not any(is_move(text) for text in ("0000", "e7e8k", "e2e4 ", "e9e4", "E2E4", "e٢e4", "", "P@e4"))


def test_fens():
    assert is_fen(chess.STARTING_FEN) and is_fen(ROOK_ENDING)
    assert is_fen("8/8/8/8/8/8/8/8 w - - 0 1")  # can be set up, legal or not
    bad = [
        "",
        "8/8/8/8/8/8/8/8 w - - 0",
        ROOK_ENDING + " 7",
        ROOK_ENDING.replace("w", "x"),
        ROOK_ENDING.replace("R7", "R8"),
        ROOK_ENDING.replace("56", "1_0"),
        ROOK_ENDING.replace("56", "-1"),
        ROOK_ENDING.replace("56", "٥٦"),
        ROOK_ENDING.replace("w -", "w KQkqK"),
        "8" * 200,
    ]
    assert not any(is_fen(text) for text in bad)


def test_policy_completions_field_by_field():
    read = parse_policy_completion("  M:a4a5   0000 x E: 0.1 nan\tB:  a4a5 \n")
    assert read.moves == ("a4a5", None, None)
    assert read.evals == (0.1, None)
    assert read.best == "a4a5"
    assert read.in_order and not read.well_formed
    assert parse_policy_completion("M: a4a5 E: 0.1 B: a4a5").well_formed


@pytest.mark.parametrize(
    "text",
    [
        "",
        "M: a4a5 E: 0.1",
        "M: a4a5 E: 0.1 B:",
        "M: a4a5 E: 0.1 B: a4a5 and more",
        "M: E: B: a4a5",
        "M: a4a5 E: 0.1 0.2 B: a4a5",
        "M: a4a5 a4a5 E: 0.1 B: a4a5",
        "E: 0.1 M: a4a5 B: a4a5",
        "so M: a4a5 E: 0.1 B: a4a5",
        "M: a4a5 E: 0.1 B: a4a5 B: a4a5",
        "M: a4a5 E: 0.1 B: 0000",
        "M: a4a5 E: inf B: a4a5",
    ],
)
def test_policy_completions_that_are_not_well_formed(text: str):
    assert not parse_policy_completion(text).well_formed


def test_a_field_written_twice_counts_once():
    read = parse_policy_completion("M: a4a5 E: 0.1 B: a4a5 M: a6a8 E: 0.2 B: a6a8")
    assert (read.moves, read.evals, read.best) == (("a4a5",), (0.1,), "a4a5")


def test_environment_completions_field_by_field():
    read = parse_environment_completion(f" {AFTER_E4} + 0.5 +1+ 0 ")
    assert (read.next_fen, read.reward, read.terminated, read.truncated) == (AFTER_E4, 0.5, True, False)
    assert read.well_formed
    read = parse_environment_completion("")
    assert (read.next_fen, read.reward, read.terminated, read.truncated) == ("", None, None, None)
    assert read.num_fields == 1 and not read.well_formed


@pytest.mark.parametrize(
    "text",
    [
        f"{AFTER_E4}+0.001+0",
        f"{AFTER_E4}+0.001+0+0+0+0",
        f"{AFTER_E4}+0.001+0+2",
        f"{AFTER_E4}+0.001+0+False",
        f"{AFTER_E4}+nan+0+0",
        f"{AFTER_E4}++0+0",
        f"{AFTER_E4[:-4]}+0.001+0+0",
        "+++",
    ],
)
def test_environment_completions_that_are_not_well_formed(text: str):
    assert not parse_environment_completion(text).well_formed


@given(st.text(alphabet=st.sampled_from("MEB: abe1248.+-\n٣\x00é"), max_size=200) | st.text(max_size=200))
@settings(max_examples=200, deadline=None)
def test_nothing_a_model_can_write_raises(text: str):
    parse_policy_completion(text)
    parse_environment_completion(text)
    is_fen(text)
