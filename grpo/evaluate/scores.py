"""Scores of a completion in each column, without a model."""

import math
from collections.abc import Mapping, Sequence

import chess
import numpy as np
import numpy.typing as npt
from rapidfuzz.distance import Levenshtein

from grpo.rewards import (
    TOP,
    Analysis,
    EnginePool,
    Position,
    ReferenceMoves,
    is_best,
    parse_environment_completion,
    parse_policy_completion,
    referee,
)
from grpo.types import Prompt

Column = npt.NDArray[np.float64]

HALF_MOVES = "self_play/legal_half_moves"
MATES = "mate_in_one"
SAMPLED = "sampled/"
"""Before the columns of sampled answers, where greedy ones stand beside them."""


def decimals(column: str) -> int | None:
    """How many decimals a column is printed with; None for a share in [0, 1], which is printed in percent."""
    column = column.removeprefix(SAMPLED)
    return 3 if column == "reward" or column.startswith("rewards/") else {HALF_MOVES: 1}.get(column)


def score_completions(
    prompts: Sequence[Prompt], completions: Sequence[str], *, engine: EnginePool | None = None
) -> dict[str, Column]:
    """By column, each completion's score in [0, 1], (N,): NaN where its prompt lacks the column.

    prompts: N, one a completion. The best move and the top five are the engine's, or without one
    those of the prompt's labels, where equal evals are equally good; without either those two
    columns are left out. A custom prompt has no columns. EngineError where the engine fails twice.
    """
    fens = list(dict.fromkeys(prompt.columns["fen"] for prompt in prompts if prompt.task == "policy"))
    ranked = {} if engine is None else dict(zip(fens, engine.analyse(fens), strict=True))
    rows: list[dict[str, float]] = []
    for prompt, text in zip(prompts, completions, strict=True):
        if prompt.task == "policy":
            rows.append(_policy_scores(text, prompt, ranked))
        else:
            rows.append(_environment_scores(text, prompt) if prompt.task == "environment" else {})
    columns = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, math.nan) for row in rows]) for name in columns}


def _policy_scores(text: str, prompt: Prompt, ranked: Mapping[str, Analysis]) -> dict[str, float]:
    fen, moves, evals = (prompt.columns.get(name) for name in ("fen", "moves", "evals"))
    assert isinstance(fen, str)
    position, truth = Position.of(chess.Board(fen)), None
    if fen in ranked:
        truth = ReferenceMoves.from_engine(position, ranked[fen], {})
    elif moves and evals:
        truth = ReferenceMoves.from_labels(position, moves, evals)
    written = position.usual(parse_policy_completion(text))
    scores = {}
    if truth is not None and truth.ranks:
        top = {move for move, rank in truth.ranks.items() if rank < TOP}
        scores["policy/best_move"] = is_best(written, truth)
        scores["policy/top5"] = len(top.intersection(written.moves)) / len(top)
    scores["policy/legal"] = float(written.best in position.legal)
    scores["policy/format"] = float(written.well_formed)
    return scores


def _environment_scores(text: str, prompt: Prompt) -> dict[str, float]:
    written = parse_environment_completion(text)
    answer = referee(prompt.columns["fen"], prompt.columns["action"])
    reward = math.nan if written.reward is None else written.reward
    return {
        "environment/next_state": float(written.next_fen == answer.next_fen),
        "environment/nls": Levenshtein.normalized_similarity(written.next_fen, answer.next_fen),
        "environment/reward": float(math.isclose(reward, answer.reward, abs_tol=1e-9)),
        "environment/terminated": float(written.terminated is answer.terminated),
        "environment/truncated": float(written.truncated is answer.truncated),
        "environment/format": float(written.well_formed),
    }
