"""Policy rewards: how good the moves after `P: {fen}` are, by the engine or by labels.

Where the truth comes from, in this order: an engine (`with_engine`); the columns `moves` and `evals`,
ranked by eval (never by a line's own `B:` field, which for Black names the worst move); nothing, and
then the components that need it are left out. A score depends on its prompt and completion alone,
never on the other completions of its group.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import chess

from .analysis import Analysis
from .engine import MULTIPV, EngineError, EnginePool
from .formats import PolicyCompletion, canonical_uci, parse_policy_completion, policy_field
from .weighted import Text, WeightedReward

TOP = MULTIPV
EVAL_FLOOR_PAWNS = 1.0
"""Eval errors are relative to the true eval, but to no less than this: 0.0 is a common truth."""


@dataclass(frozen=True, eq=False)
class Position:
    """A position to be played on, and the moves legal in it (UCI)."""

    board: chess.Board
    fen: str
    legal: frozenset[str]

    @staticmethod
    def of(board: chess.Board) -> "Position":
        return Position(board, board.fen(), frozenset(move.uci() for move in board.legal_moves))

    def usual(self, written: PolicyCompletion) -> PolicyCompletion:
        """The same with moves as `legal` has them, see `canonical_uci`."""
        moves = tuple(move and canonical_uci(self.board, move) for move in written.moves)
        return dataclasses.replace(written, moves=moves, best=canonical_uci(self.board, written.best))


@dataclass(frozen=True)
class ReferenceMoves:
    """Known moves and evals of a position. `ranks` (0 is best) of the ranked moves, `evals` in pawns."""

    legal: frozenset[str]
    ranks: Mapping[str, int]
    evals: Mapping[str, float]

    @staticmethod
    def from_engine(position: Position, best: Analysis, others: Mapping[str, float]) -> "ReferenceMoves":
        """The engine's own order of its best moves, and the evals of `others` as well."""
        ranks = {move: rank for rank, move in enumerate(best.moves)}
        return ReferenceMoves(
            position.legal, ranks, {**others, **dict(zip(best.moves, best.evals, strict=True))}
        )

    @staticmethod
    def from_labels(
        position: Position, moves: Sequence[str], numbers: Sequence[float]
    ) -> "ReferenceMoves | None":
        """By eval alone: labels come shuffled, so equal evals share the better rank.

        numbers: the evals. None where no move is legal. ValueError unless there is one finite eval a move.
        """
        if len(moves) != len(numbers):
            raise ValueError(f"{len(moves)} moves and {len(numbers)} evals: expected one eval a move")
        if not all(math.isfinite(number) for number in numbers):
            raise ValueError(f"evals are finite numbers of pawns, not {list(numbers)}")
        evals: dict[str, float] = {}
        for text, number in zip(moves, numbers, strict=True):
            if (move := canonical_uci(position.board, text)) in position.legal:
                evals[move] = max(float(number), evals.get(move, -math.inf))
        ranks = {move: sum(other > value for other in evals.values()) for move, value in evals.items()}
        return ReferenceMoves(position.legal, ranks, evals) if evals else None


def best_move(written: PolicyCompletion, truth: ReferenceMoves) -> float:
    """1.0 the best move, 0.7 in the top 3, 0.5 in the top 5, 0.1 legal, else 0."""
    if written.best not in truth.legal:
        return 0.0
    rank = truth.ranks.get(written.best, TOP)
    return 1.0 if rank == 0 else 0.7 if rank < 3 else 0.5 if rank < TOP else 0.1


def move_candidates(written: PolicyCompletion, truth: ReferenceMoves) -> float:
    """Share of the listed entries in the top 5; a move listed twice earns once.

    A list shorter than the position allows is judged as if the missing entries were wrong.
    """
    top = {move for move in written.moves if move is not None and truth.ranks.get(move, TOP) < TOP}
    return len(top) / max(len(written.moves), _expected_moves(truth), 1)


def _expected_moves(truth: ReferenceMoves) -> int:
    """How many moves a full list has: five, or as many as the engine or the labels rank."""
    return min(TOP, len(truth.ranks))


def evaluations(written: PolicyCompletion, truth: ReferenceMoves) -> float:
    """Mean over the listed moves of 1 - min(1, |e - t| / max(|t|, 1 pawn)), t that same move's truth.

    An illegal move, a move listed before and a missing or unreadable eval earn 0, and so does each move
    that is missing from a full list. A legal move without a truth (labels name only a few) is left out.
    """
    evals = [*written.evals, *[None] * len(written.moves)]
    scores: list[float] = []
    left_out = 0
    seen = set()
    for move, number in zip(written.moves, evals, strict=False):
        if move in truth.legal and move not in truth.evals:
            left_out += 1
            continue
        if move is None or number is None or move in seen or move not in truth.evals:
            scores.append(0.0)
        else:
            true = truth.evals[move]
            scores.append(1.0 - min(1.0, abs(number - true) / max(abs(true), EVAL_FLOOR_PAWNS)))
        seen.add(move)
    return sum(scores) / max(len(scores), _expected_moves(truth) - left_out, 1)


def legal(written: PolicyCompletion, truth: ReferenceMoves) -> float:
    """1 for a legal move in B:, else nothing."""
    return float(written.best in truth.legal)


def is_best(written: PolicyCompletion, truth: ReferenceMoves) -> float:
    """1 for the best move, else nothing."""
    return float(best_move(written, truth) == 1.0)


WEIGHTS = {"best_move": 4.0, "format": 2.0, "move_candidates": 1.5, "evaluations": 1.0}
LEGAL_WEIGHTS = {**WEIGHTS, "legal": 4.0}
"""For a model that still breaks the rules: the default pays 0.1 of best_move for keeping them."""
_LABELS = {"move_candidates": "M:", "evaluations": "E:", "best_move": "B:", "is_best": "B:", "legal": "B:"}
"""Fields that components judge; the other components judge all."""


@dataclass(frozen=True, eq=False)
class PolicyReward(WeightedReward):
    """The reward of completions of `P: {fen}`.

    EngineError where the engine fails on a position twice: a reward is never guessed.
    """

    name: str = "policy"
    weights: Mapping[str, float] = dataclasses.field(default_factory=WEIGHTS.copy)
    engine: EnginePool | None = None

    prefix: ClassVar[str] = "P:"
    reads: ClassVar[tuple[str, ...]] = ("fen", "moves", "evals")
    from_truth: ClassVar[Mapping[str, Callable[[Any, Any], float]]] = {
        "best_move": best_move,
        "move_candidates": move_candidates,
        "evaluations": evaluations,
        "is_best": is_best,
        "legal": legal,
    }

    def field_of(self, component: str, completion: str) -> tuple[int, int]:
        return policy_field(completion, _LABELS[component]) if component in _LABELS else (0, len(completion))

    def with_engine(self, engine: EnginePool | None) -> Self:
        """A copy that asks `engine` for the truth. Closing it is the caller's."""
        return dataclasses.replace(self, engine=engine)

    def prepare(
        self, prompts: Sequence[Text], completions: Sequence[str] | None = None, **columns: Any
    ) -> None:
        """Start the engine on these prompts now; scoring them later finds the answers there.

        completions: to which it asks about the moves in them, too, once the best ones are known.
        """
        if self.engine is None or not self._needs_truth():
            return
        own, texts, own_columns = self._own(prompts, columns)
        positions = self._positions(texts, own_columns)
        for position in dict.fromkeys(p for p in positions if p is not None):
            best = self.engine.submit(position.fen)
            if completions is not None and "evaluations" in self.weights:
                rows = [row for row, other in zip(own, positions, strict=True) if other == position]
                written = [position.usual(parse_policy_completion(completions[row])) for row in rows]
                best.add_done_callback(functools.partial(_ask_others, self.engine, position, written))

    def _score(
        self, prompts: Sequence[str], completions: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[dict[str, float]]:
        written = [parse_policy_completion(text) for text in completions]
        truths: list[ReferenceMoves | None] = [None] * len(written)
        if self._needs_truth():
            positions = self._positions(prompts, columns)
            pairs = zip(positions, written, strict=True)
            written = [text if position is None else position.usual(text) for position, text in pairs]
            if self.engine is not None:
                truths = self._from_engine(self.engine, positions, written)
            else:
                truths = self._from_labels(positions, columns["moves"], columns["evals"])
        return [self._row(*row) for row in zip(written, truths, strict=True)]

    def _positions(
        self, prompts: Sequence[str], columns: Mapping[str, Sequence[Any]]
    ) -> list[Position | None]:
        positions = []
        for prompt, fen in zip(prompts, columns["fen"], strict=True):
            fen = prompt.removeprefix(self.prefix).partition("M:")[0].strip() if fen is None else fen
            if (position := _position(fen)) is None:
                self._leave_out("position illegal or game over", f"such as {fen[:100]!r}")
            positions.append(position)
        return positions

    def _from_engine(
        self, engine: EnginePool, positions: Sequence[Position | None], written: Sequence[PolicyCompletion]
    ) -> list[ReferenceMoves | None]:
        asked = {p.fen: engine.submit(p.fen) for p in dict.fromkeys(positions) if p is not None}
        best = {fen: future.result() for fen, future in asked.items()}
        # One question a move: the eval of a move must not depend on what its siblings listed.
        others: dict[str, dict[str, Future[Analysis]]] = {fen: {} for fen in best}
        for position, completion in zip(positions, written, strict=True):
            if position is not None and "evaluations" in self.weights:
                fen, known = position.fen, others[position.fen]
                for move in position.legal.intersection(completion.moves).difference(best[fen].moves, known):
                    known[move] = engine.submit(fen, [move])
        evals = {fen: {m: f.result().evals[0] for m, f in moves.items()} for fen, moves in others.items()}
        return [
            p if p is None else ReferenceMoves.from_engine(p, best[p.fen], evals[p.fen]) for p in positions
        ]

    def _from_labels(
        self, positions: Sequence[Position | None], moves: Sequence[Any], evals: Sequence[Any]
    ) -> list[ReferenceMoves | None]:
        truths: list[ReferenceMoves | None] = []
        for position, row_moves, row_evals in zip(positions, moves, evals, strict=True):
            truth = None
            if position is not None and row_moves is not None and row_evals is not None and len(row_moves):
                truth = ReferenceMoves.from_labels(position, row_moves, row_evals)
            if position is not None and truth is None:
                self._leave_out("no engine and no labels", "see with_engine, or give columns moves and evals")
            truths.append(truth)
        return truths


def _ask_others(
    engine: EnginePool, position: Position, written: Sequence[PolicyCompletion], best: Future[Analysis]
) -> None:
    """Asks for the evals of legal moves that are not among the best."""
    with suppress(EngineError):  # whoever scores them will be told
        moves = {move for text in written for move in text.moves}
        for move in position.legal.intersection(moves).difference(best.result().moves):
            engine.submit(position.fen, [move])


@functools.lru_cache(maxsize=4096)
def _position(fen: str) -> Position | None:
    """None where `fen` is no FEN, its position illegal or its game over."""
    try:
        board = chess.Board(fen)
    except ValueError:
        return None
    if not board.is_valid() or board.is_game_over():
        return None
    return Position.of(board)
