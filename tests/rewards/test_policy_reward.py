"""The policy reward, worked out by hand, component by component."""

from concurrent.futures import Future

import chess
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prompt_lines import parse_line

import rewards.weighted
from rewards import REWARDS
from rewards.analysis import Analysis
from rewards.engine import EngineError, EnginePool, find_stockfish
from rewards.formats import PolicySample
from rewards.policy import PolicyReward

FEN = "8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56"
PROMPT = f"P: {FEN}"
COMPLETION = "M: a4a5 d4c4 a6g6 a6a8 d4c5      E: 0.0 0.0 0.0 0.0 0.0      B: d4c5"
MOVES = ["a4a5", "d4c4", "a6g6", "a6a8", "d4c5"]
# By eval: a4a5 0.3, d4c5 0.2, a6g6 0.1, a6a8 0.0, d4c4 -4.0.
EVALS = [0.3, -4.0, 0.1, 0.0, 0.2]
policy = REWARDS["policy"]
assert isinstance(policy, PolicyReward)


def score(completion: str, *, reward: PolicyReward = policy, moves=MOVES, evals=EVALS, fen=FEN):
    """(components, reward) of one completion."""
    columns = {"fen": [fen], "moves": [moves], "evals": [evals]}
    (row,) = reward.components([f"P: {fen}"], [completion], **columns)
    (total,) = reward(prompts=[f"P: {fen}"], completions=[completion], completion_ids=[[1]], **columns)
    return row, total


class Engine:
    """An engine that knows one position: the five best moves of `EVALS`, and a6h6 at -2 pawns."""

    multipv = 5

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[str, ...]]] = []

    def submit(self, fen: str, moves=()) -> "Future[Analysis]":
        self.asked.append((fen, tuple(moves)))
        future: Future[Analysis] = Future()
        best = Analysis.from_labels(MOVES, EVALS)
        future.set_result(Analysis(tuple(moves), tuple(-2.0 for _ in moves)) if moves else best)
        return future


@pytest.fixture(autouse=True)
def forget_warnings(monkeypatch):
    monkeypatch.setattr(rewards.weighted, "_said", set())


@pytest.fixture
def said():
    lines: list[str] = []
    sink = rewards.weighted.logger.add(lambda line: lines.append(str(line)), format="{message}")
    yield lines
    rewards.weighted.logger.remove(sink)


# -------------------------------------------------------------------------------------- by hand


def test_the_published_line_scores_what_a_person_computes():
    row, total = score(COMPLETION)
    # Errors 0.3, 4.0, 0.1, 0.0, 0.2 against max(|truth|, 1) = 1, 4, 1, 1, 1.
    evaluations = (0.7 + 0.0 + 0.9 + 1.0 + 0.8) / 5
    assert row == pytest.approx(
        {"best_move": 0.7, "format": 1.0, "move_candidates": 1.0, "evaluations": evaluations}
    )
    assert total == pytest.approx((4 * 0.7 + 2 * 1 + 1.5 * 1 + 1 * 0.68) / 8.5)


def test_the_published_line_against_its_own_labels_is_perfect():
    # All five are 0.0: equal evals share the better rank, as nothing tells which came first.
    row, total = score(COMPLETION, evals=[0.0] * 5)
    assert row == {"best_move": 1.0, "format": 1.0, "move_candidates": 1.0, "evaluations": 1.0}
    assert total == 1.0


@pytest.mark.parametrize(
    ("best", "earned"),
    [
        ("a4a5", 1.0),
        ("d4c5", 0.7),
        ("a6g6", 0.7),
        ("a6a8", 0.5),
        ("d4c4", 0.5),
        ("a6h6", 0.1),  # legal
        ("a6h7", 0.0),  # not
        ("0000", 0.0),
        ("", 0.0),
    ],
)
def test_best_move(best: str, earned: float):
    assert score(f"M: a4a5 E: 0.3 B: {best}")[0]["best_move"] == earned
    assert score(f"M: a4a5 E: 0.3 B: {best}", reward=policy.with_engine(Engine()))[0]["best_move"] == earned
    sparse = REWARDS["policy-best"]
    assert score(f"M: a4a5 E: 0.3 B: {best}", reward=sparse) == (
        {"is_best": float(earned == 1.0)},
        float(earned == 1.0),
    )


@pytest.mark.parametrize(
    ("moves", "earned"),
    [
        ("a4a5 d4c4", 1.0),
        ("a4a5 a6h6", 0.5),  # legal, not in the top 5
        ("a4a5 a6h7 0000 a9a9", 0.25),  # illegal, and no moves at all: in the denominator
        ("a4a5 a4a5 a4a5", 1 / 3),  # a duplicate earns once
        ("", 0.0),
    ],
)
def test_move_candidates(moves: str, earned: float):
    assert score(f"M: {moves} E: 0 B: a4a5")[0]["move_candidates"] == pytest.approx(earned)


@pytest.mark.parametrize(
    ("moves", "evals", "earned"),
    [
        ("d4c4", "-3.0", 0.75),  # one pawn off, of four
        ("d4c4", "-9", 0.0),  # off by more than all of it: clipped
        ("a4a5 d4c4", "0.3 -4", 1.0),
        ("d4c4 a4a5", "0.3 -4", 0.0),  # the right numbers at each other's moves
        ("a4a5 d4c4", "0.3", 0.5),  # one missing
        ("a4a5", "0.3 1 2 3", 1.0),  # too many: the format's business
        ("a4a5 d4c4", "nan -4", 0.5),
        ("a4a5 d4c4", "inf -4", 0.5),
        ("a4a5 a4a5", "0.3 0.3", 0.5),  # once
        ("a4a5 a6h7", "0.3 0.3", 0.5),  # illegal
        ("", "", 0.0),
    ],
)
def test_evaluations(moves: str, evals: str, earned: float):
    text = f"M: {moves} E: {evals} B: a4a5"
    assert score(text)[0]["evaluations"] == pytest.approx(earned)
    assert score(text, reward=policy.with_engine(Engine()))[0]["evaluations"] == pytest.approx(earned)


def test_a_legal_move_without_a_truth_is_left_out_with_labels_and_asked_of_an_engine():
    text = "M: a4a5 a6h6 E: 0.3 -1.0 B: a4a5"
    assert score(text)[0]["evaluations"] == 1.0
    engine = Engine()
    row, _ = score(text, reward=policy.with_engine(engine))
    assert row["evaluations"] == pytest.approx((1 + 0.5) / 2)  # one pawn off, of two
    assert row["move_candidates"] == 0.5
    # Nothing to score is 0, not absent: all completions of a prompt are measured alike.
    assert score("M: a6h6 E: -2 B: a6h6")[0]["evaluations"] == 0.0


def test_a_lazy_completion_that_lists_one_move_earns_as_much_as_five():
    # Known and kept: the components pay for shares, so one right move with its eval is perfect.
    assert score("M: a4a5 E: 0.3 B: a4a5")[1] == 1.0
    # Lazier: always the same illegal move, in form. Only the format pays.
    assert score("M: a1a1 E: 0.0 B: a1a1")[1] == pytest.approx(2 / 8.5)
    assert score("")[1] == 0.0


# ------------------------------------------------------------------------------------ where truth is from


def test_trap_1_the_lines_own_best_is_not_believed():
    # Black to move promotes; the published data would name the lowest eval as B:.
    line = "P: 8/8/8/8/3k4/8/3p4/K7 b - - 0 60 M: d4c3 d2d1q d2d1r d4d3 E: 4.5 9.9 5.1 0.0 B: d4d3"
    sample = parse_line(line)
    assert isinstance(sample, PolicySample) and sample.best == "d4d3"
    labels = {"moves": list(sample.moves), "evals": list(sample.evals), "fen": sample.fen}
    assert score("M: d2d1q E: 9.9 B: d2d1q", **labels)[0]["best_move"] == 1.0
    assert score("M: d4d3 E: 0.0 B: d4d3", **labels)[0]["best_move"] == 0.5


def test_an_engine_is_believed_before_labels():
    text = "M: d4c5 E: 0.2 B: d4c5"
    wrong = [-1.0, -1.0, -1.0, -1.0, 5.0]
    assert score(text, evals=wrong)[0]["best_move"] == 1.0
    assert score(text, evals=wrong, reward=policy.with_engine(Engine()))[0]["best_move"] == 0.7


def test_without_engine_and_labels_the_format_alone_counts_and_that_is_said_once(said):
    for _ in range(3):
        assert score(COMPLETION, moves=None, evals=None) == ({"format": 1.0}, 1.0)
        assert policy([PROMPT], [COMPLETION]) == [1.0]
        assert policy([PROMPT], ["M: a4a5"]) == [0.0]
    assert len(said) == 1 and "best_move, move_candidates, evaluations left out" in said[0]


@pytest.mark.parametrize(
    "fen", ["no fen", "", "8/8/8/8/8/8/8/8 w - - 0 1", "R5k1/5ppp/8/8/8/8/8/4K3 b - - 1 1"]
)
def test_positions_that_cannot_be_ranked_leave_the_format(fen: str, said):
    engine = Engine()
    for reward in (policy, policy.with_engine(engine)):
        assert score(COMPLETION, fen=fen, reward=reward) == ({"format": 1.0}, 1.0)
    policy.with_engine(engine).prepare([f"P: {fen}"])
    assert engine.asked == [] and len(said) == 1


def test_nothing_weighted_and_scorable_is_none():
    assert policy.with_weights({"format": 0})([PROMPT], [COMPLETION]) == [None]


def test_labels_of_two_lengths_are_an_error():
    with pytest.raises(ValueError, match="5 moves and 4 evals"):
        score(COMPLETION, evals=EVALS[:4])


def test_the_prompt_is_read_where_the_column_is_missing():
    for prompt in (PROMPT, PROMPT + " ", f"P: {FEN:90}", f"P:{FEN}"):
        engine = Engine()
        assert policy.with_engine(engine)([prompt], ["M: a4a5 E: 0.3 B: a4a5"]) == [1.0]
        assert engine.asked == [(FEN, ())]


# ---------------------------------------------------------------------------------- calling convention


def test_prompts_of_others_get_none_and_rows_stay_in_place():
    prompts = ["A: x+e2e4+e2e4+", PROMPT, "hello", PROMPT]
    completions = ["", "M: a4a5 E: 0.3 B: a4a5", COMPLETION, ""]
    columns = {"fen": [None, FEN, None, FEN], "moves": [None, MOVES, None, MOVES], "evals": [None, EVALS] * 2}
    got = policy(prompts, completions, **columns, action=["e2e4", None, None, None], trainer_state=object())
    assert got == [None, 1.0, None, 0.0]
    assert policy([], []) == []


def test_messages_count_by_their_last_content():
    prompt = [{"role": "system", "content": "A: no"}, {"role": "user", "content": PROMPT}]
    completion = [{"role": "assistant", "content": "M: a4a5 E: 0.3 B: a4a5"}]
    assert policy([prompt], [completion], moves=[MOVES], evals=[EVALS]) == [1.0]
    for odd in ([], [{"role": "assistant"}], [{"role": "assistant", "content": None}]):
        assert policy([prompt], [odd], moves=[MOVES], evals=[EVALS]) == [0.0]
        assert policy([odd], [completion]) == [None]


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="2 prompts and 1 completions"):
        policy([PROMPT] * 2, [COMPLETION])
    with pytest.raises(ValueError, match="'fen' has 1 rows for 2 prompts"):
        policy([PROMPT] * 2, [COMPLETION] * 2, fen=[FEN])


def test_weights():
    assert policy.weights == {"best_move": 4.0, "format": 2.0, "move_candidates": 1.5, "evaluations": 1.0}
    only = policy.with_weights({"best_move": 1, "move_candidates": 0, "evaluations": 0})
    row, total = score(COMPLETION, reward=only)
    assert set(row) == set(policy.weights)  # weight 0: logged, not paid
    assert total == pytest.approx((0.7 + 2) / 3)
    assert policy.weights["best_move"] == 4.0 and only.__name__ == policy.__name__ == "policy"
    with pytest.raises(ValueError, match=r"'speling'.*best_move.*format"):
        policy.with_weights({"speling": 1.0})
    for bad in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="'format': "):
            policy.with_weights({"format": bad})
    with pytest.raises(ValueError, match="at least one weight above 0"):
        PolicyReward(weights={"format": 0.0})


CASTLE = "r3k2r/pppppppp/8/8/8/8/PPPPPPPP/R3K2R w KQkq - 0 1"


@pytest.mark.parametrize("kingside", ["e1g1", "e1h1"])
@pytest.mark.parametrize("queenside", ["e1c1", "e1a1"])
@pytest.mark.parametrize("label", ["e1h1", "e1g1"])
def test_castling_is_castling_however_it_is_written(kingside, queenside, label):
    """Lichess's data has the rook's square; both count the same, in labels and in what a model writes."""
    row, total = score(
        f"M: {kingside} {queenside} E: 0.5 0.2 B: {kingside}",
        fen=CASTLE, moves=[label, "e1a1", "a2a3"], evals=[0.5, 0.2, 0.1],
    )  # fmt: skip
    assert row == {"format": 1.0, "best_move": 1.0, "move_candidates": 1.0, "evaluations": 1.0} and total == 1
    second, _ = score(
        f"M: {queenside} E: 0.2 B: {queenside}", fen=CASTLE, moves=[label, "e1c1"], evals=[1, 0]
    )
    assert second["best_move"] == 0.7


def test_castling_listed_in_both_ways_earns_once():
    row, _ = score("M: e1g1 e1h1 E: 0.5 0.5 B: e1g1", fen=CASTLE, moves=["e1h1"], evals=[0.5])
    assert row["move_candidates"] == row["evaluations"] == 0.5


def test_an_engine_must_rank_five_moves():
    engine = Engine()
    engine.multipv = 3
    with pytest.raises(ValueError, match="multipv=3"):
        policy.with_engine(engine)
    assert policy.engine is None


def test_positions_are_asked_once_and_moves_one_by_one():
    engine = Engine()
    reward = policy.with_engine(engine)
    texts = ["M: a6h6 a6f6 a4a5 E: 0 0 0 B: a4a5", "M: a6h6 E: 0 B: a4a5", "junk"]
    reward.prepare([PROMPT] * 3 + ["A: x"])
    assert engine.asked == [(FEN, ())]
    reward([PROMPT] * 3, texts)
    assert sorted(engine.asked[1:]) == [(FEN, ()), (FEN, ("a6f6",)), (FEN, ("a6h6",))]


def test_a_score_does_not_depend_on_its_siblings():
    if find_stockfish() is None:
        pytest.skip("Stockfish is not installed")
    texts = [f"M: {move.uci()} E: 0.5 B: {move.uci()}" for move in chess.Board(FEN).legal_moves]
    with EnginePool(depth=6, cache_path=":memory:") as pool:
        together = policy.with_engine(pool)([PROMPT] * len(texts), texts)
    with EnginePool(depth=6, cache_path=":memory:") as pool:
        alone = [policy.with_engine(pool)([PROMPT], [text])[0] for text in reversed(texts)][::-1]
    assert together == alone and len(set(alone)) > 2


def test_a_failing_engine_is_not_scored_around():
    class Broken(Engine):
        def submit(self, fen, moves=()):
            future: Future[Analysis] = Future()
            future.set_exception(EngineError("failed twice"))
            return future

    with pytest.raises(EngineError, match="failed twice"):
        policy.with_engine(Broken())([PROMPT], [COMPLETION])


# ----------------------------------------------------------------------------------------- malformed

MALFORMED = [
    *(COMPLETION[:end] for end in range(len(COMPLETION))),
    *(COMPLETION[start:] for start in range(len(COMPLETION))),
    "M: " + "a4a5 " * 2000 + "E: 0 B: a4a5",
    "E:" * 5000,
    "M:E:B:" * 1667,
    "x" * 10_000,
    " " * 10_000,
    "M: 0000 E: 0 B: 0000",
    "M: a4a5 E: 0 0 0 B: a4a5",
    "M: a4a5 E: nan B: a4a5",
    "M: a4a5 E: -inf B: a4a5",
    "M: a4a5 E: 1e999 B: a4a5",
    "M: a4a5 E: 999999999 B: a4a5",
    "M: a4a5 E: ٣ B: a4a5",
    "M: a４a5 E: 0 B: a4a5",
    "M: a4a5\x00 E: 0\x00 B: a4a5\x00",
    "M: a4a5 E: 0 B: a4a5 M: a4a5 E: 0 B: a4a5",
    "M: P@e4 e7e8k E: 0 0 B: P@e4",
    "♔♕♖ \ud800",
]


@pytest.mark.parametrize("engine", [None, Engine()], ids=["labels", "engine"])
def test_malformed_texts_get_a_score_and_no_exception(engine):
    reward = policy.with_engine(engine)
    many = len(MALFORMED)
    columns = {"fen": [FEN] * many, "moves": [MOVES] * many, "evals": [EVALS] * many}
    for row in reward.components([PROMPT] * many, MALFORMED, **columns):
        assert set(row) == set(reward.weights) and all(0 <= value <= 1 for value in row.values())
    assert all(0 <= total <= 1 for total in reward([PROMPT] * many, MALFORMED, **columns))


def test_a_completion_cut_anywhere_is_not_in_form_and_never_earns_more():
    whole = score(COMPLETION)[1]
    for end in range(len(COMPLETION)):
        row, total = score(COMPLETION[:end])
        assert row["format"] == 0.0 and total < whole


pieces = st.sampled_from(
    ["M:", "E:", "B:", " ", *MOVES, "a6h6", "0000", "0.3", "-4", "nan", "٣", "1e9", "\n", "x"]
)


@given(st.lists(pieces, max_size=30).map("".join) | st.text(max_size=100))
@example("M: a4a5 E: 0.3 B: a4a5")
@settings(max_examples=200, deadline=None)
def test_any_text_gets_a_score(text: str):
    row, total = score(text)
    assert set(row) == set(policy.weights)
    assert all(0 <= value <= 1 for value in row.values()) and 0 <= total <= 1
    if row["format"]:
        assert text.count("M:") == text.count("E:") == text.count("B:") == 1
