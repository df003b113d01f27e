"""Completions as cards, with boards where they are about chess, and a match's last game.

A policy's move is an arrow; beside the position of an environment's prompt stands the predicted one.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chess
import chess.svg
from markupsafe import Markup

from grpo.evaluate.boards import check_answer
from grpo.logs.screen import shortened
from grpo.play.record import Match
from grpo.rewards import as_move
from grpo.workbench.report.charts import own_ids
from grpo.workbench.report.read import RunFolder
from grpo.workbench.sizes import Record, figure

GOOD, BAD, WRONG_SQUARE = "#1f6fb5c8", "#c0392bd0", "#e8a39b"
_COLORS = {
    "square light": "#eef1f4",
    "square dark": "#b9c6d3",
    "margin": "#ffffff",
    "coord": "#5a6675",
    "inner border": "#aab3bd",
    "outer border": "#ffffff",
}
CANDIDATES, SHOWN = 96, 3
"""Completions logged last, among which the best and worst of each task are chosen; how many are shown."""
LETTERS = 1000
"""The longest prompt or completion that the table of all shows whole."""


class BoardCard(NamedTuple):
    """A completion, with boards if it is about chess, what is wrong with it, and its rewards by name."""

    title: str
    prompt: str
    completion: str
    boards: Sequence[Markup] = ()
    remark: str = ""
    scores: Mapping[str, float] = {}


def board(
    name: str, position: chess.Board, move: str, caption: str, *, is_legal: bool = True, **options: Any
) -> Markup:
    """A position with a move (UCI) as an arrow. name: unique within the page. options: of chess.svg.board."""
    color, played = GOOD if is_legal else BAD, as_move(move)
    arrows = [chess.svg.Arrow(played.from_square, played.to_square, color=color)] if played else []
    svg = chess.svg.board(position, arrows=arrows, colors=_COLORS, **options)
    figure = '<figure class="board">{}<figcaption>{}</figcaption></figure>'
    return Markup(figure).format(own_ids(svg, name), caption)


def answer_card(title: str, name: str, prompt: str, completion: str) -> BoardCard:
    """Makes a card of a model's answer, judged by the rules where it is about chess. name: unique within the
    page."""
    answer, card = check_answer(prompt, completion), BoardCard(title, prompt, completion)
    if answer is None:
        return card
    verdict, legal = f": {answer.verdict}" if answer.right else "", answer.move_is_legal
    if answer.predicted is None:
        boards = [board(name, answer.board, answer.move, f"{answer.task}{verdict}", is_legal=legal)]
    else:  # side by side there is no room for letters and digits at their edges
        red, narrow = dict.fromkeys(answer.wrong, WRONG_SQUARE), {"coordinates": False}
        boards = [
            board(name, answer.board, answer.move, answer.task, is_legal=legal, **narrow),
            board(f"{name}-after", answer.predicted, "", f"predicted{verdict}", fill=red, **narrow),
        ]
    return card._replace(boards=boards, remark="" if answer.right else f"{answer.verdict}.")


def game_card(match: Match) -> BoardCard:
    """The last finished game: its end, and all its moves."""
    game = match.finished[-1]
    white, black = match.players if game.first_is_white else match.players[::-1]
    moves = chess.Board(game.fen).variation_san(game.board.move_stack)
    end = board("game", game.board, "".join(game.moves[-1:]), game.ending)
    return BoardCard(f"The last game: {white} against {black}, {game.result}", game.fen, moves, [end])


def reward_weights(run: RunFolder) -> dict[str, float]:
    """The weights of a run's reward functions, by name."""
    functions = [str(name).rpartition(":")[2] for name in run.settings.get("reward") or []]
    factors = map(float, run.settings.get("reward_weights") or [1.0] * len(functions))
    return dict(zip(functions, factors, strict=False))  # whose settings may be cut short


def logged_completions(run: RunFolder) -> list[dict[str, Any]]:
    """Step, weighted reward, prompt and completion of all that was logged."""
    weights = reward_weights(run)
    return [
        {
            "step": int(row["step"]),
            "reward": _reward(row, weights),
            "prompt": shortened(_prompt(row), LETTERS),
            "completion": shortened(str(row.get("completion") or ""), LETTERS),
        }
        for row in run.completions
        if figure(row, "step") is not None
    ]


def completion_cards(run: RunFolder) -> list[BoardCard]:
    """By task, the best and the worst of the completions logged last, by reward as the run weighs it."""
    weights = reward_weights(run)
    return [
        _card(record, task, f"{task} {place}", weights)
        for task, records in best_and_worst(run.completions, weights).items()
        for place, record in enumerate(records)
    ]


def best_and_worst(completions: Sequence[Record], weights: Mapping[str, float]) -> dict[str, list[Record]]:
    """By task, as rewards of different tasks do not compare: the best first, the worst last.

    The same text to the same prompt is shown once; different prompts come before others.
    """
    unlike = {(_prompt(row), str(row.get("completion"))): row for row in completions[-CANDIDATES:]}
    tasks: dict[str, list[Record]] = {}
    for (prompt, _), record in unlike.items():
        tasks.setdefault({"P:": "policy", "A:": "environment"}.get(prompt[:2], "text"), []).append(record)
    for task, records in tasks.items():
        ranked = sorted(records, key=lambda record: -_reward(record, weights))
        best = _by_prompt(ranked)[:SHOWN]
        worst = _by_prompt([record for record in reversed(ranked) if record not in best])[:SHOWN]
        tasks[task] = [*best, *reversed(worst)]
    return tasks


def _by_prompt(ranked: Sequence[Record]) -> list[Record]:
    """The first of each prompt, then the rest."""
    first = {_prompt(record): record for record in reversed(ranked)}.values()
    return sorted(ranked, key=lambda record: record not in first)


def _reward(record: Record, weights: Mapping[str, float]) -> float:
    """weights: by reward function; one that is not in them counts once."""
    rewards = record.get("rewards") or {}
    return sum(weights.get(name, 1.0) * (figure(rewards, name) or 0.0) for name in rewards)


def _prompt(record: Record) -> str:
    """Returns the text of a conversation."""
    messages = record.get("messages") or []
    lines = [f"{message.get('role')}: {message.get('content', '')}" for message in messages]
    return "\n".join(lines) or str(record.get("prompt") or "")


def _card(record: Record, task: str, name: str, weights: Mapping[str, float]) -> BoardCard:
    advantage, parts = figure(record, "advantage"), record.get("components") or record.get("rewards") or {}
    title = f"step {record.get('step')}, {task}, reward {_reward(record, weights):.3f}"
    title += "" if advantage is None else f", advantage {advantage:+.2f}"
    card = answer_card(title, name, _prompt(record), str(record.get("completion") or ""))
    cut = f"Cut off after {record.get('num_tokens')} tokens." if record.get("terminated") is False else ""
    scores = {part: value for part in parts if (value := figure(parts, part)) is not None}
    return card._replace(scores=scores, remark=f"{card.remark} {cut}".strip())
