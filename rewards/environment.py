"""Environment rewards: python-chess is the referee of what the model says happens next.

The truth is a function of position and move. `history` is not read: it could only matter to fivefold
repetition, which needs the whole game. Most of a next FEN is a copy of the one before, so similarity
alone pays 0.9 for copying: `exact` and `fen_gain` pay for the move.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import chess
from rapidfuzz.distance import Levenshtein

from .formats import EnvironmentCompletion, environment_field, parse_environment_completion
from .weighted import WeightedReward

LEGAL_REWARD, MATE_REWARD, DRAW_REWARD, ILLEGAL_REWARD = 0.001, 1.0, 0.5, -1.0
_ROUNDING = 1e-9


class Outcome(NamedTuple):
    """The answer to an environment prompt."""

    next_fen: str
    reward: float
    terminated: bool
    truncated: bool


def referee(fen: str, action: str) -> Outcome:
    """Play `action` (UCI) in `fen`. An illegal move truncates and leaves the position as it was.

    FENs are `board.fen()`'s: an en-passant square only where a capture there is legal, as in the
    RookWorld data. A null move is illegal. ValueError if `fen` is not a FEN.
    """
    board = chess.Board(fen)
    try:
        move = chess.Move.from_uci(action)
    except ValueError:
        move = chess.Move.null()
    if move not in board.legal_moves:
        return Outcome(fen, ILLEGAL_REWARD, board.is_game_over(), True)
    board.push(move)
    terminated = board.is_game_over()
    reward = MATE_REWARD if board.is_checkmate() else DRAW_REWARD if terminated else LEGAL_REWARD
    return Outcome(board.fen(), reward, terminated, False)


class Question(NamedTuple):
    """A prompt's position, as it was, and the right answer to it."""

    fen: str
    answer: Outcome


def fen_match(written: EnvironmentCompletion, question: Question) -> float:
    """1.0 the exact next FEN, else normalized Levenshtein similarity (1 - distance / longer length)."""
    return Levenshtein.normalized_similarity(written.next_fen, question.answer.next_fen)


def fen_gain(written: EnvironmentCompletion, question: Question) -> float:
    """How far from the unchanged FEN (0) to the right one (1); exact or 0 where those are the same."""
    copied = Levenshtein.normalized_similarity(question.fen, question.answer.next_fen)
    similarity = fen_match(written, question)
    if copied == 1.0:
        return float(similarity == 1.0)
    return max(0.0, (similarity - copied) / (1.0 - copied))


def game_state(written: EnvironmentCompletion, question: Question) -> float:
    """1.0 terminated and truncated both right, 0.5 one of them."""
    answer = question.answer
    return ((written.terminated is answer.terminated) + (written.truncated is answer.truncated)) / 2


def reward_value(written: EnvironmentCompletion, question: Question) -> float:
    """1.0 within 0.1 of the reward, 0.5 within 0.3."""
    if written.reward is None:
        return 0.0
    error = abs(written.reward - question.answer.reward) - _ROUNDING
    return 1.0 if error <= 0.1 else 0.5 if error <= 0.3 else 0.0


def exact(written: EnvironmentCompletion, question: Question) -> float:
    """1.0 where the FEN, the value of the reward and both flags are right and nothing else is there."""
    answer = question.answer
    return float(
        written.well_formed
        and written.next_fen == answer.next_fen
        and written.reward is not None
        and abs(written.reward - answer.reward) <= _ROUNDING
        and game_state(written, question) == 1.0
    )


WEIGHTS = {"format": 4.0, "fen_match": 3.0, "game_state": 2.0, "reward_value": 1.0}
GAIN_WEIGHTS = {"format": 4.0, "fen_gain": 3.0, "game_state": 2.0, "reward_value": 1.0}
SPARSE_WEIGHTS = {"exact": 1.0}
_FIELDS = {"fen_match": (0, 1), "fen_gain": (0, 1), "reward_value": (1, 2), "game_state": (2, 4)}
"""The fields that components judge, from the first to before the last; the others judge all."""


@dataclass(frozen=True, eq=False)
class EnvironmentReward(WeightedReward):
    """The reward of completions of `A: {fen}+{action}+{history}+`."""

    name: str = "environment"
    weights: Mapping[str, float] = field(default_factory=WEIGHTS.copy)

    prefix: ClassVar[str] = "A:"
    reads: ClassVar[tuple[str, ...]] = ("fen", "action")
    from_truth: ClassVar[Mapping[str, Callable[[Any, Any], float]]] = {
        "fen_match": fen_match,
        "fen_gain": fen_gain,
        "game_state": game_state,
        "reward_value": reward_value,
        "exact": exact,
    }

    def field_of(self, component: str, completion: str) -> tuple[int, int]:
        fields = _FIELDS.get(component)
        return environment_field(completion, *fields) if fields else (0, len(completion))

    def _score(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[dict[str, float]]:
        rows = []
        for prompt, text, fen, action in zip(
            prompts, completions, columns["fen"], columns["action"], strict=True
        ):
            fields = [part.strip() for part in prompt.removeprefix(self.prefix).split("+")]
            fen = fields[0] if fen is None else fen
            question = _question(fen, "".join(fields[1:2]) if action is None else action)
            if question is None:
                self._leave_out("not a FEN in the prompt", f"such as {fen[:100]!r}")
            rows.append(self._row(parse_environment_completion(text), question))
        return rows


@functools.lru_cache(maxsize=4096)
def _question(fen: str, action: str) -> Question | None:
    """None where `fen` is no FEN."""
    try:
        return Question(fen, referee(fen, action))
    except ValueError:
        return None
