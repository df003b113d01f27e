"""The two rewards, worked out by hand, component by component; the texts they read; TRL with them."""

import math
import random
from concurrent.futures import Future

import chess
import pytest
from conftest import examples
from hypothesis import example, given
from hypothesis import strategies as st
from prompt_lines import AFTER_E4, START

import rewards.weighted
from rewards import REWARDS, formats
from rewards.analysis import Analysis
from rewards.engine import EngineError, EnginePool, find_stockfish
from rewards.environment import Outcome, referee

MATE_IN_ONE, MATED = "6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1", "R5k1/5ppp/8/8/8/8/8/4K3 b - - 1 1"
QUESTION, ANSWER = f"A: {START}+e2e4+e2e4+", f"{AFTER_E4}+0.001+0+0"
FEN = "8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56"
PROMPT = f"P: {FEN}"
COMPLETION = "M: a4a5 d4c4 a6g6 a6a8 d4c5      E: 0.0 0.0 0.0 0.0 0.0      B: d4c5"
MOVES = ["a4a5", "d4c4", "a6g6", "a6a8", "d4c5"]
# By eval: a4a5 0.3, d4c5 0.2, a6g6 0.1, a6a8 0.0, d4c4 -4.0.
EVALS = [0.3, -4.0, 0.1, 0.0, 0.2]
RANKED = ("a4a5", "d4c5", "a6g6", "a6a8", "d4c4"), (0.3, 0.2, 0.1, 0.0, -4.0)
policy = REWARDS["policy"]
environment, sparse, gain = (REWARDS[f"environment{kind}"] for kind in ("", "-sparse", "-gain"))


def score(completion: str, *, reward=policy, moves=MOVES, evals=EVALS, fen: str = FEN) -> tuple[dict, float]:
    """(components, reward) of one completion of a policy prompt."""
    columns = {"fen": [fen], "moves": [moves], "evals": [evals]}
    (row,) = reward.components([f"P: {fen}"], [completion], **columns)
    (total,) = reward(prompts=[f"P: {fen}"], completions=[completion], completion_ids=[[1]], **columns)
    return row, total


def judge(completion: str, *, reward=environment, fen: str = START, action="e2e4") -> tuple[dict, float]:
    """(components, reward) of one completion of an environment prompt."""
    prompt, columns = f"A: {fen}+{action}+{action}+", {"fen": [fen], "action": [action]}
    (row,) = reward.components([prompt], [completion], **columns, history=[[action]])
    (total,) = reward(prompts=[prompt], completions=[completion], completion_ids=[[1]], **columns)
    return row, total


class Engine:
    """An engine that knows one position: the five best moves of `EVALS`, and all others at -2 pawns."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def submit(self, fen: str, moves=()) -> "Future[Analysis]":
        self.asked.append((fen, tuple(moves)))
        future, best = Future(), Analysis(*RANKED)
        future.set_result(Analysis(tuple(moves), (-2.0,) * len(moves)) if moves else best)
        return future


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(rewards.weighted, "_warnings", set())


def test_prompts_are_written_with_the_ten_newest_moves():
    assert formats.policy_prompt(FEN, trailing_space=True) == formats.policy_prompt(FEN) + " " == PROMPT + " "
    history = [f"a{i}a{i + 1}" for i in range(1, 8)] * 2
    assert formats.environment_prompt("fen", "a7a8", history) == f"A: fen+a7a8+{' '.join(history[-10:])}+"


def test_numbers_moves_and_fens():
    """An Arabic-Indic three is one to float(), 1_0 to int(), and "1" * 400 would be infinite."""
    good = {"0.0": 0.0, "-12": -12.0, "+.5": 0.5, "999.99": 999.99, "1.": 1.0}
    assert {text: formats.parse_number(text) for text in good} == good
    for text in ("nan", "inf", "-inf", "1e5", "1_0", "٣", "1.2.3", "--1", "", ".", "1" * 400):
        assert formats.parse_number(text) is None, text
    assert formats.is_move("e7e8q") and formats.is_move("a1h8")
    for text in ("0000", "e7e8k", "e2e4 ", "e9e4", "E2E4", "e٢e4", "", "P@e4"):
        assert not formats.is_move(text), text
    assert all(map(formats.is_fen, (START, FEN, "8/8/8/8/8/8/8/8 w - - 0 1")))  # which can be set up
    changed = (("w", "x"), ("R7", "R8"), ("56", "1_0"), ("56", "-1"), ("56", "٥٦"), ("w -", "w KQkqK"))
    for text in ("", FEN[:-3], FEN + " 7", "8" * 200, *(FEN.replace(*pair) for pair in changed)):
        assert not formats.is_fen(text), text


def test_completions_field_by_field():
    read = formats.parse_policy_completion("  M:a4a5   0000 x E: 0.1 nan\tB:  a4a5 \n")
    assert (read.moves, read.evals, read.best) == (("a4a5", None, None), (0.1, None), "a4a5")
    assert read.in_order and not read.well_formed
    read = formats.parse_policy_completion("M: a4a5 E: 0.1 B: a4a5 M: a6a8 E: 0.2 B: a6a8")
    assert (read.moves, read.evals, read.best) == (("a4a5",), (0.1,), "a4a5")  # twice counts once
    whole = f" {AFTER_E4} + 0.5 +1+ 0 "
    for text, fields in ((whole, (AFTER_E4, 0.5, True, False)), ("", ("", None, None, None))):
        answer = formats.parse_environment_completion(text)
        assert (answer.next_fen, answer.reward, answer.terminated, answer.truncated) == fields
        assert answer.well_formed == bool(text) and answer.num_fields == (4 if text else 1)


def test_what_is_well_formed():
    assert formats.parse_policy_completion("M: a4a5 E: 0.1 B: a4a5").well_formed
    for text in (
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
    ):
        assert not formats.parse_policy_completion(text).well_formed, text
    rests = ("+0.001+0", "+0.001+0+0+0+0", "+0.001+0+2", "+0.001+0+False", "+nan+0+0", "++0+0")
    for text in (*(AFTER_E4 + rest for rest in rests), f"{AFTER_E4[:-4]}+0.001+0+0", "+++"):
        assert not formats.parse_environment_completion(text).well_formed, text


def test_the_published_line_scores_what_a_person_computes():
    row, total = score(COMPLETION)
    # Errors 0.3, 4.0, 0.1, 0.0, 0.2 against max(|truth|, 1) = 1, 4, 1, 1, 1.
    evaluations = (0.7 + 0.0 + 0.9 + 1.0 + 0.8) / 5
    by_hand = {"best_move": 0.7, "format": 1.0, "move_candidates": 1.0, "evaluations": evaluations}
    assert row == pytest.approx(by_hand)
    assert total == pytest.approx((4 * 0.7 + 2 * 1 + 1.5 * 1 + 1 * 0.68) / 8.5)
    # Its own labels are all 0.0: equal evals share the better rank, as nothing tells which came first.
    assert score(COMPLETION, evals=[0.0] * 5) == (dict.fromkeys(by_hand, 1.0), 1.0)
    # One right move with its eval is one of five: a short list must not be the best answer.
    assert score("M: a4a5 E: 0.3 B: a4a5")[1] == pytest.approx((4 + 2 + 1.5 / 5 + 1 / 5) / 8.5)
    # Lazier: always the same illegal move, in form. Only the format pays.
    assert score("M: a1a1 E: 0.0 B: a1a1")[1] == pytest.approx(2 / 8.5) and score("")[1] == 0.0


def test_best_move():
    by_rank = {"a4a5": 1.0, "d4c5": 0.7, "a6g6": 0.7, "a6a8": 0.5, "d4c4": 0.5}
    for best, earned in {**by_rank, "a6h6": 0.1, "a6h7": 0.0, "0000": 0.0, "": 0.0}.items():  # legal, illegal
        text, is_best = f"M: a4a5 E: 0.3 B: {best}", float(best == "a4a5")
        assert score(text)[0]["best_move"] == earned, best
        assert score(text, reward=policy.with_engine(Engine()))[0]["best_move"] == earned, best
        assert score(text, reward=REWARDS["policy-best"]) == ({"is_best": is_best}, is_best)
        assert score(text, reward=REWARDS["policy-legal"])[0]["legal"] == float(earned > 0), best


@pytest.mark.parametrize(
    ("moves", "evals", "candidates", "evaluations"),
    [
        # Of five moves that a full list has.
        ("d4c4", "-3.0", 1 / 5, 0.75 / 5),  # one pawn off, of four
        ("d4c4", "-9", 1 / 5, 0.0),  # off by more than all of it: clipped
        ("a4a5 d4c4", "0.3 -4", 2 / 5, 2 / 5),
        ("d4c4 a4a5", "0.3 -4", 2 / 5, 0.0),  # at each other's moves
        ("a4a5 d4c4", "0.3", 2 / 5, 1 / 5),
        ("a4a5", "0.3 1 2 3", 1 / 5, 1 / 5),  # missing; too many: of the format
        ("a4a5 d4c4", "inf -4", 2 / 5, 1 / 5),
        ("", "", 0.0, 0.0),
        ("a4a5 a4a5 a4a5", "0.3 0.3 0.3", 1 / 5, 1 / 5),  # a duplicate earns once
        ("a4a5 a4a5 a4a5 a4a5 a4a5 a4a5", "0.3 0.3 0.3 0.3 0.3 0.3", 1 / 6, 1 / 6),  # and a long list no more
        ("a4a5 a6h7 0000 a9a9", "0.3 0.3 0 0", 1 / 5, 1 / 5),  # illegal, and no moves: in the denominator
    ],
)
def test_move_candidates_and_evaluations(moves: str, evals: str, candidates: float, evaluations: float):
    for reward in (policy, policy.with_engine(Engine())):
        row, _ = score(f"M: {moves} E: {evals} B: a4a5", reward=reward)
        earned = {"move_candidates": candidates, "evaluations": evaluations}
        assert {name: row[name] for name in earned} == pytest.approx(earned)


def test_a_legal_move_without_a_truth_is_left_out_with_labels_and_asked_of_an_engine():
    text = "M: a4a5 a6h6 E: 0.3 -1.0 B: a4a5"
    assert score(text)[0]["evaluations"] == pytest.approx(1 / 4)  # of the five one is left out
    row, _ = score(text, reward=policy.with_engine(Engine()))
    assert row["evaluations"] == pytest.approx((1 + 0.5) / 5)  # one pawn off, of two
    assert row["move_candidates"] == pytest.approx(1 / 5)
    # Nothing to score is 0, not absent: all completions of a prompt are measured alike.
    assert score("M: a6h6 E: -2 B: a6h6")[0]["evaluations"] == 0.0


def test_the_lines_own_best_is_not_believed():
    """Black to move promotes; the published data would name the lowest eval as B:, d4d3."""
    labels = {
        "fen": "8/8/8/8/3k4/8/3p4/K7 b - - 0 60",
        "moves": ["d4c3", "d2d1q", "d2d1r", "d4d3"],
        "evals": [4.5, 9.9, 5.1, 0.0],
    }
    assert score("M: d2d1q E: 9.9 B: d2d1q", **labels)[0]["best_move"] == 1.0
    assert score("M: d4d3 E: 0.0 B: d4d3", **labels)[0]["best_move"] == 0.5


def test_an_engine_is_believed_before_labels_and_is_not_scored_around_where_it_fails():
    text, engine, failed = "M: d4c5 E: 0.2 B: d4c5", Engine(), Future()
    for reward, earned in ((policy, 1.0), (policy.with_engine(engine), 0.7)):
        assert score(text, evals=[-1, -1, -1, -1, 5], reward=reward)[0]["best_move"] == earned
    failed.set_exception(EngineError("failed twice"))
    engine.submit = lambda fen, moves=(): failed
    with pytest.raises(EngineError, match="failed twice"):
        policy.with_engine(engine)([PROMPT], [COMPLETION])


def test_without_engine_and_labels_the_format_alone_counts_and_that_is_said_once(logged):
    for _ in range(2):
        assert score(COMPLETION, moves=None, evals=None) == ({"format": 1.0}, 1.0)
        assert policy([PROMPT] * 2, [COMPLETION, "M: a4a5"]) == [1.0, 0.0]
    assert len(logged) == 1 and "best_move, move_candidates, evaluations left out" in logged[0]
    assert policy.with_weights({"format": 0})([PROMPT], [COMPLETION]) == [None]  # nothing weighted is left


@pytest.mark.parametrize("fen", ["no fen", "", "8/8/8/8/8/8/8/8 w - - 0 1", MATED])
def test_positions_that_cannot_be_ranked_leave_the_format(fen: str, logged):
    engine = Engine()
    for reward in (policy, policy.with_engine(engine)):
        assert score(COMPLETION, fen=fen, reward=reward) == ({"format": 1.0}, 1.0)
    policy.with_engine(engine).prepare([f"P: {fen}"])
    assert engine.asked == [] and len(logged) == 1


def test_positions_are_asked_once_and_moves_one_by_one():
    engine = Engine()
    reward = policy.with_engine(engine)
    reward.prepare([PROMPT] * 3 + ["A: x"])
    assert engine.asked == [(FEN, ())]
    reward([PROMPT] * 3, ["M: a6h6 a6f6 a4a5 E: 0 0 0 B: a4a5", "M: a6h6 E: 0 B: a4a5", "junk"])
    assert sorted(engine.asked[1:]) == [(FEN, ()), (FEN, ("a6f6",)), (FEN, ("a6h6",))]


def test_a_score_does_not_depend_on_its_siblings():
    if find_stockfish() is None:
        pytest.skip("Stockfish is not installed")
    texts = [f"M: {move.uci()} E: 0.5 B: {move.uci()}" for move in chess.Board(FEN).legal_moves]
    engines = [EnginePool(depth=6, cache_path=":memory:") for _ in range(2)]
    with engines[0], engines[1]:
        together, alone = (policy.with_engine(each) for each in engines)
        scores = together([PROMPT] * len(texts), texts)
        assert scores == [alone([PROMPT], [text])[0] for text in reversed(texts)][::-1]
    assert len(set(scores)) > 2


@pytest.mark.parametrize("kingside", ["e1g1", "e1h1"])
@pytest.mark.parametrize("queenside", ["e1c1", "e1a1"])
@pytest.mark.parametrize("label", ["e1h1", "e1g1"])
def test_castling_is_castling_however_it_is_written(kingside, queenside, label):
    """Lichess's data has the rook's square; both count the same, in labels and in what a model writes."""
    labels = {"fen": "r3k2r/pppppppp/8/8/8/8/PPPPPPPP/R3K2R w KQkq - 0 1"}
    labels |= {"moves": [label, "e1a1", "a2a3"], "evals": [0.5, 0.2, 0.1]}
    row, total = score(f"M: {kingside} {queenside} E: 0.5 0.2 B: {kingside}", **labels)
    assert row == pytest.approx({"best_move": 1, "format": 1, "move_candidates": 2 / 3, "evaluations": 2 / 3})
    assert total == pytest.approx((4 + 2 + 2.5 * 2 / 3) / 8.5)  # two of the three that the labels name
    assert score(f"M: {queenside} E: 0.2 B: {queenside}", **labels)[0]["best_move"] == 0.7
    twice, _ = score("M: e1g1 e1h1 E: 0.5 0.5 B: e1g1", **labels)
    assert (
        twice["move_candidates"] == twice["evaluations"] == pytest.approx(1 / 3)
    )  # listed in both ways it earns once


@pytest.mark.parametrize(
    ("fen", "action", "after", "earned"),
    [
        (START, "e2e4", AFTER_E4, 0.001),
        (MATE_IN_ONE, "a1a8", MATED, 1.0),
        ("k7/8/1K6/8/8/8/8/2Q5 w - - 0 1", "c1c7", "k7/2Q5/1K6/8/8/8/8/8 b - - 1 1", 0.5),  # stalemate
        ("8/8/4k3/8/8/3pK3/8/8 w - - 0 1", "e3d3", "8/8/4k3/8/8/3K4/8/8 b - - 0 1", 0.5),  # two bare kings
        ("8/P6k/8/8/8/8/8/K7 w - - 0 1", "a7a8q", "Q7/7k/8/8/8/8/8/K7 b - - 0 1", 0.001),
        # The en-passant square is written only where a capture there is legal.
        ("4k3/8/8/8/3p4/8/4P3/4K3 w - - 0 1", "e2e4", "4k3/8/8/8/3pP3/8/8/4K3 b - e3 0 1", 0.001),
    ],
)
def test_the_referee(fen: str, action: str, after: str, earned: float):
    assert referee(fen, action) == Outcome(after, earned, earned > 0.001, False)
    for illegal in ("e2e5", "e7e5", "0000", "P@e4", "hello", ""):
        assert referee(START, illegal) == Outcome(START, -1.0, False, True)


@given(st.integers(0, 10**6))
@examples(30)
def test_the_referee_takes_any_board_and_any_move(seed: int):
    rng, board = random.Random(seed), chess.Board(None)
    for square in rng.sample(chess.SQUARES, rng.randint(0, 12)):
        board.set_piece_at(square, chess.Piece(rng.randint(1, 6), rng.random() < 0.5))
    board.turn = rng.random() < 0.5
    for move in [*list(board.legal_moves)[:10], chess.Move(*rng.sample(chess.SQUARES, 2))]:
        after, value, ended, cut = referee(board.fen(), move.uci())
        assert value in (0.001, 1.0, 0.5, -1.0) and cut == (move not in board.legal_moves)
        for reward in (environment, sparse, gain):
            answer = f"{after}+{value}+{ended:d}+{cut:d}"
            assert judge(answer, reward=reward, fen=board.fen(), action=move.uci())[1] == 1.0


def test_what_the_right_answer_a_copy_and_half_the_change_earn():
    row, total = judge(ANSWER)
    assert row == {"format": 1.0, "fen_match": 1.0, "game_state": 1.0, "reward_value": 1.0} and total == 1.0
    assert judge(ANSWER, reward=sparse) == ({"exact": 1.0}, 1.0)
    assert list(judge(ANSWER, reward=gain)[0]) == ["format", "fen_gain", "game_state", "reward_value"]
    # From the old FEN (56 characters) to the new (58): 8 -> 4P3 three edits, P -> 1, w -> b: 5 in all.
    copy = f"{START}+0.001+0+0"
    row, total = judge(copy)
    assert row["fen_match"] == pytest.approx(53 / 58)
    assert total == pytest.approx((4 + 3 * 53 / 58 + 2 + 1) / 10) and total > 0.97  # nearly everything
    assert judge(copy, reward=sparse)[1] == judge(copy, reward=gain)[0]["fen_gain"] == 0.0
    both = environment.with_weights({"fen_gain": 3.0, "fen_match": 0.0})
    assert judge(copy, reward=gain)[1] == pytest.approx(0.7) == judge(copy, reward=both)[1]
    # The side to move still wrong: one edit of 58 left, where copying leaves five.
    half = ANSWER.replace(" b ", " w ")
    assert judge(half)[0]["fen_match"] == pytest.approx(57 / 58)
    assert judge(half, reward=gain)[0]["fen_gain"] == pytest.approx(4 / 5)
    # Further away than the copy is 0, not below.
    assert judge("8/8/8/8/8/8/8/8 w - - 0 1+0.001+0+0", reward=gain)[0]["fen_gain"] == 0.0
    row, total = judge(ANSWER + "+0")  # a fifth field costs the format and exactness
    assert row == {"format": 0.0, "fen_match": 1.0, "game_state": 1.0, "reward_value": 1.0}
    assert total == pytest.approx(0.6) and judge(ANSWER + "+0", reward=sparse)[1] == 0.0
    # An illegal move leaves the position: a copy is right, and gain is exact or nothing.
    right, wrong = f"{START}+-1.0+0+1", f"{AFTER_E4}+-1.0+0+1"
    assert [judge(right, reward=r, action="e2e5")[1] for r in (environment, sparse, gain)] == [1.0] * 3
    assert judge(wrong, reward=gain, action="e2e5")[0]["fen_gain"] == 0.0
    assert judge(wrong, reward=environment, action="e2e5")[0]["fen_match"] == pytest.approx(53 / 58)


def test_the_value_of_the_reward_and_the_state_of_the_game():
    """The value is right up to 0.1 away, half right up to 0.3: the edges belong to it."""
    for value, earned in (
        ("0.001", 1.0),
        ("0.0010", 1.0),
        ("0.0", 1.0),
        ("0.101", 1.0),
        ("0.102", 0.5),
        ("0.301", 0.5),
        ("0.302", 0.0),
        ("-0.099", 1.0),
        ("nan", 0.0),
        ("inf", 0.0),
        ("", 0.0),
    ):
        text = f"{AFTER_E4}+{value}+0+0"
        assert judge(text)[0]["reward_value"] == earned, value
        assert judge(text, reward=sparse)[1] == float(value in ("0.001", "0.0010")), value
    for value, earned in {"1.1": 1.0, "1.11": 0.5, "0.7": 0.5, "0.69": 0.0}.items():
        row, _ = judge(f"{MATED}+{value}+1+0", fen=MATE_IN_ONE, action="a1a8")
        assert row == {"format": 1.0, "fen_match": 1.0, "game_state": 1.0, "reward_value": earned}, value
    for flags, earned in {"0+0": 1.0, "1+0": 0.5, "0+1": 0.5, "1+1": 0.0, "0": 0.5, "x+y": 0.0}.items():
        text = f"{AFTER_E4}+0.001+{flags}"
        assert judge(text)[0]["game_state"] == earned, flags
        assert judge(text, reward=sparse)[1] == float(earned == 1.0), flags


pieces = st.sampled_from(
    ["M:", "E:", "B:", " ", *MOVES, "a6h6", "0000", "0.3", "-4", "nan", "٣", "1e9", "\n", "x", "P@e4"]
)
letters = st.sampled_from("+ /0123456789abcdefghKQRBNPkqrbnpw-.٣\x00")


@given(
    st.lists(pieces, max_size=30).map("".join)
    | st.text(letters, max_size=100)
    | st.text(max_size=200)
    | st.text(letters, max_size=5).map(ANSWER.__add__)
)
@example("M: a4a5 E: 0.3 B: a4a5")
@example("M: " + "a4a5 " * 2000 + "E: 0 B: a4a5")
@example("M:E:B:" * 1667)
@example("+" * 10_000)
@example("M: a4a5\0 E: 0\0 B: a4a5\0 ♔ \ud800")
@examples(200)
def test_any_text_gets_a_score_and_fields(text: str):
    formats.is_fen(text)
    row, total = score(text)
    assert set(row) == set(policy.weights)
    assert all(0 <= value <= 1 for value in row.values()) and 0 <= total <= 1
    assert not row["format"] or text.count("M:") == text.count("E:") == text.count("B:") == 1
    row, total = judge(text)
    assert 0 <= total <= 1 and all(0 <= value <= 1 for value in row.values())
    assert (row["fen_match"] == 1.0) == (text.split("+")[0].strip() == AFTER_E4)
    assert judge(text, reward=sparse)[1] in (0.0, 1.0)
    for reward in REWARDS.values():
        for component in reward.weights:
            start, end = reward.field_of(component, text)
            assert 0 <= start <= end <= len(text)
    assert policy.field_of("format", text) == environment.field_of("format", text) == (0, len(text))


def test_texts_cut_anywhere_earn_less_than_whole():
    for end in range(len(COMPLETION)):
        row, total = score(COMPLETION[:end])
        assert row["format"] == 0.0 and total < score(COMPLETION)[1], end
    for reward in (environment, sparse, gain):
        for end in range(len(ANSWER)):
            assert max(judge(part, reward=reward)[1] for part in (ANSWER[:end], ANSWER[end + 1 :])) < 1, end


def test_which_letters_of_a_completion_a_component_judges():
    text, answer = " M: a1a2 b1b2 E: 0.1 -0.2 B: a1a2", "8/8/8/8/8/8/8/K1k5 w - - 0 1+0.001+0+1"
    for label, field in {"M:": "M: a1a2 b1b2 ", "E:": "E: 0.1 -0.2 ", "B:": "B: a1a2"}.items():
        assert text[slice(*formats.policy_field(text, label))] == field
    assert formats.policy_field(" M: a1a2", "B:") == (0, 8)  # a label that is missing is everybody's fault
    assert formats.policy_field("B: a1a2 B: b1b2", "B:") == (0, 8)  # and of two the first counts
    for fields, field in {(0, 1): answer[:29], (1, 2): "0.001+", (2, 4): "0+1", (0, 4): answer}.items():
        assert answer[slice(*formats.environment_field(answer, *fields))] == field
    assert formats.environment_field("8/8 w", 2, 4) == (0, 5)  # too few fields: judged as a whole
    assert formats.environment_field("8/8 w+0.1", 2, 4) == (0, 9)
    assert formats.environment_field("8/8 w+0.1", 1, 2) == (6, 9)
    assert environment.field_of("format", "++++0") == (0, 5)  # all letters, the surplus ones too


def test_prompts_of_others_get_none_and_rows_stay_in_place():
    prompts, short = ["A: x+e2e4+e2e4+", PROMPT, "hello", PROMPT], "M: a4a5 E: 0.3 B: a4a5"
    columns = {"fen": [None, FEN, None, FEN], "moves": [None, MOVES, None, MOVES], "evals": [None, EVALS] * 2}
    columns |= {"action": ["e2e4", None, None, None], "trainer_state": object()}
    earned = [None, pytest.approx(6.5 / 8.5), None, 0.0]
    assert policy(prompts, ["", short, COMPLETION, ""], **columns) == earned
    assert policy([], []) == []
    assert environment([PROMPT, QUESTION, "", QUESTION], ["", ANSWER, ANSWER, ""]) == [None, 1.0, None, 0.0]


def test_messages_count_by_their_last_content():
    prompt = [{"role": "system", "content": "A: no"}, {"role": "user", "content": PROMPT}]
    completion, labels = [{"content": "M: a4a5 E: 0.3 B: a4a5"}], {"moves": [MOVES], "evals": [EVALS]}
    assert policy([prompt], [completion], **labels) == [pytest.approx(6.5 / 8.5)]
    for odd in ([], [{"role": "assistant", "content": None}]):
        assert policy([prompt], [odd], **labels) == [0.0] and policy([odd], [completion]) == [None]
    assert environment([[{"role": "user", "content": QUESTION}]], [[{"content": ANSWER}]]) == [1.0]


def test_the_prompt_is_read_where_the_columns_are_missing():
    for prompt in (PROMPT, PROMPT + " ", f"P: {FEN:90}", f"P:{FEN}"):
        engine = Engine()
        assert policy.with_engine(engine)([prompt], ["M: a4a5 E: 0.3 B: a4a5"]) == [pytest.approx(6.5 / 8.5)]
        assert engine.asked == [(FEN, ())]
    assert environment([QUESTION], [ANSWER]) == [1.0]
    assert environment([QUESTION], [ANSWER], fen=[None], action=[None], history=[None]) == [1.0]
    assert environment(["A: x+e2e4+"], [ANSWER], fen=[START], action=["e2e4"]) == [1.0]
    assert environment([QUESTION], [ANSWER], action=["d2d4"])[0] < 1.0
    for prompt in ("A:", "A: ", "A: nonsense", "A: 9/9+e2e4+e2e4+", "A:+++"):  # none there either
        assert environment.components([prompt], [ANSWER]) == [{"format": 1.0}]
        assert environment([prompt], [ANSWER]) == [1.0] and sparse([prompt], [ANSWER]) == [None]


def test_names_weights_and_shares():
    assert {name: reward.__name__ for name, reward in REWARDS.items()} == {
        name: name
        for name in (
            "policy",
            "policy-best",
            "policy-legal",
            "environment",
            "environment-sparse",
            "environment-gain",
        )
    }
    assert policy.weights == {"best_move": 4.0, "format": 2.0, "move_candidates": 1.5, "evaluations": 1.0}
    assert environment.weights == {"format": 4.0, "fen_match": 3.0, "game_state": 2.0, "reward_value": 1.0}
    only = policy.with_weights({"best_move": 1, "move_candidates": 0, "evaluations": 0})
    row, total = score(COMPLETION, reward=only)
    assert set(row) == set(policy.weights)  # weight 0: logged, not paid
    assert total == pytest.approx((0.7 + 2) / 3) == sum(only.shares(row).values())
    assert policy.weights["best_move"] == 4.0 and only.__name__ == "policy" and environment.shares({}) == {}


def test_trls_trainer_runs_with_the_rewards(tmp_path, load, own_accelerator):
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    names = ("prompt", "fen", "moves", "evals", "action", "history")
    rows = [(PROMPT, FEN, MOVES, EVALS, None, None), (QUESTION, START, None, None, "e2e4", ["e2e4"])]
    seen: list[dict[str, list]] = []

    def spy(prompts, completions, **columns):
        """Our rewards answer the same call alike, with a string for a string."""
        assert all(isinstance(text, str) for text in [*prompts, *completions])
        own = {name: REWARDS[name](prompts, completions, **columns) for name in ("policy", "environment")}
        seen.append(own)
        assert [said is None for said in own["policy"]] == [prompt[0] == "A" for prompt in prompts]
        return [0.0] * len(prompts)

    tiny = load()
    trainer = GRPOTrainer(
        model=tiny.model,
        processing_class=tiny.tokenizer,
        reward_funcs=[policy, environment, spy],
        train_dataset=Dataset.from_list([dict(zip(names, row, strict=True)) for row in rows]),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=12,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "rewards/policy/mean" in entry]
    assert len(steps) == len(seen) == 2
    for entry, ours in zip(steps, seen, strict=True):
        for name, said in ours.items():
            scored, mean = [reward for reward in said if reward is not None], entry[f"rewards/{name}/mean"]
            assert mean == pytest.approx(sum(scored) / len(scored)) if scored else math.isnan(mean)
