"""Completions as cards, with boards where they are about chess, and a match's last game.

A policy's move is an arrow; beside the position of an environment's prompt stands the predicted one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import chess
import chess.svg

from grpo.evaluate.boards import judge
from grpo.play.record import Match
from grpo.workbench.report.charts import own_ids
from grpo.workbench.report.page import Card, Picture
from grpo.workbench.report.read import Run
from grpo.workbench.sizes import Record, figure
from rewards.formats import as_move

GOOD, BAD, WRONG_SQUARE = "#1f6fb5c8", "#c0392bd0", "#e8a39b"
_COLORS = {
    "square light": "#eef1f4", "square dark": "#b9c6d3", "margin": "#ffffff", "coord": "#5a6675",
    "inner border": "#aab3bd", "outer border": "#ffffff",
}  # fmt: skip
CANDIDATES, SHOWN = 96, 3
"""Of so many completions that were logged last, the best and the worst of each task that are shown."""


def board(
    name: str, position: chess.Board, move: str, caption: str, *, is_legal: bool = True, **how: Any
) -> Picture:
    """A position with a move (UCI) as an arrow. name: unique within the page. how: as of chess.svg.board."""
    color, played = GOOD if is_legal else BAD, as_move(move)
    arrows = [chess.svg.Arrow(played.from_square, played.to_square, color=color)] if played else []
    return Picture(own_ids(chess.svg.board(position, arrows=arrows, colors=_COLORS, **how), name), caption)


def answer_card(title: str, name: str, prompt: str, completion: str) -> Card:
    """What a model wrote, judged by the rules where it is about chess. name: unique within the page."""
    answer = judge(prompt, completion)
    if answer is None:
        return Card(title, [], prompt, completion)
    lone = answer.predicted is None  # two side by side have no room for letters and digits at their edges
    boards = [
        board(name, answer.board, answer.move, answer.given, is_legal=answer.move_is_legal, coordinates=lone)
    ]
    if answer.predicted is not None:
        red = dict.fromkeys(answer.wrong, WRONG_SQUARE)
        boards.append(board(f"{name}-after", answer.predicted, "", "predicted", fill=red, coordinates=False))
    if not answer.right:
        return Card(title, boards, prompt, completion, remark=f"{answer.verdict}.")
    boards[-1] = boards[-1]._replace(caption=f"{boards[-1].caption}: {answer.verdict}")
    return Card(title, boards, prompt, completion)


def cards(run: Run) -> list[Card]:
    """Of the last logged steps, the best and the worst of each task by reward, as the run weighs it."""
    names, given = run.settings.get("reward") or [], run.settings.get("reward_weights") or []
    functions = [str(name).rpartition(":")[2] for name in names]
    weights = dict(zip(functions, map(float, given), strict=True)) if len(names) == len(given) else {}
    return [
        _card(record, f"card {place}", _reward(record, weights))
        for place, record in enumerate(chosen(run.completions, weights))
    ]


def chosen(completions: Sequence[Record], weights: Mapping[str, float]) -> list[Record]:
    """Task by task, as rewards of different tasks do not compare: the best first, the worst last.

    The same text to the same prompt is shown once; different prompts come before others.
    """
    last = {(_asked(record), str(record.get("completion"))): record for record in completions[-CANDIDATES:]}
    tasks: dict[str, list[Record]] = {}
    for (prompt, _), record in last.items():
        tasks.setdefault(_task(prompt), []).append(record)
    picked: list[Record] = []
    for records in tasks.values():
        ranked = sorted(records, key=lambda record: -_reward(record, weights))
        best = _by_prompt(ranked)[:SHOWN]
        worst = _by_prompt([record for record in reversed(ranked) if record not in best])[:SHOWN]
        picked += [*best, *reversed(worst)]
    return picked


def _by_prompt(ranked: Sequence[Record]) -> list[Record]:
    """The first of each prompt, then the rest."""
    first: dict[str, Record] = {}
    for record in ranked:
        first.setdefault(_asked(record), record)
    return [*first.values(), *(record for record in ranked if record not in first.values())]


def _reward(record: Record, weights: Mapping[str, float]) -> float:
    """weights: by reward function; one that is not in them counts once."""
    rewards = record.get("rewards") or {}
    return sum(weights.get(name, 1.0) * (figure(rewards, name) or 0.0) for name in rewards)


def _task(prompt: str) -> str:
    return {"P:": "policy", "A:": "environment"}.get(prompt[:2], "text")


def _asked(record: Record) -> str:
    """The prompt, of a conversation what was said in it."""
    messages = record.get("messages") or []
    said = [f"{message.get('role')}: {message.get('content', '')}" for message in messages]
    return "\n".join(said) or str(record.get("prompt") or "")


def _card(record: Record, name: str, reward: float) -> Card:
    prompt, advantage = _asked(record), figure(record, "advantage")
    title = f"step {record.get('step')}, {_task(prompt)}, reward {reward:.3f}"
    title += "" if advantage is None else f", advantage {advantage:+.2f}"
    card = answer_card(title, name, prompt, str(record.get("completion") or ""))
    parts = record.get("components") or record.get("rewards") or {}
    scores = {part: value for part in parts if (value := figure(parts, part)) is not None}
    cut = f"Cut off after {record.get('num_tokens')} tokens." if record.get("terminated") is False else ""
    return card._replace(scores=scores, remark=f"{card.remark} {cut}".strip())


def game_card(match: Match) -> Card:
    """The last finished game: its end, and all its moves."""
    game = match.finished[-1]
    white, black = match.players if game.first_is_white else match.players[::-1]
    moves = [chess.Move.from_uci(move) for move in game.moves]
    end = board("game", game.board, "".join(game.moves[-1:]), game.ending)
    title = f"The last game: {white} against {black}, {game.result}"
    return Card(title, [end], game.fen, chess.Board(game.fen).variation_san(moves))
