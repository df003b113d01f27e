"""Positions, RookWorld lines and files of them, for the tests of prompts."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import chess

from grpo.data import Prompt, PromptSource
from rewards.environment import referee
from rewards.formats import environment_prompt, parse_environment_completion, parse_policy_completion

START = chess.STARTING_FEN
BLACK_LINE = (  # a published line: B: is the lowest eval, Black is to move
    f"P: {'8/1p3pk1/p5p1/4p1b1/P1B1P3/1P3P2/2r3PP/3R2K1 b - - 1 30':90}"
    f"M: {'g5e3 g5f4 c2c3 b7b6 g7f6':27}E: {'3.1 1.2 1.1 1.0 0.9':37}B: g7f6"
)
AFTER_E4 = "rnbqkbnr/pppppppp/8/8/4P3/8/PPPP1PPP/RNBQKBNR b KQkq - 0 1"
ENVIRONMENT_LINE = f"A: {START}+e2e4+e2e4+{AFTER_E4}+0.001+0+0"


class PolicySample(NamedTuple):
    """One `P:` line. `evals[i]` belongs to `moves[i]`; `best` is the line's own `B:` field."""

    fen: str
    moves: tuple[str, ...]
    evals: tuple[float, ...]
    best: str


class EnvironmentSample(NamedTuple):
    """One `A:` line: the question (fen, action, history) and the referee's answer."""

    fen: str
    action: str
    history: tuple[str, ...]
    next_fen: str
    reward: float
    terminated: bool
    truncated: bool


def policy_completion(
    moves: Iterable[str], evals: Iterable[float], best: str, *, padded: bool = False
) -> str:
    """The text behind the prompt; the published data pads its fields with spaces to fixed widths."""
    said, numbers = " ".join(moves), " ".join(str(round(value, 3)) for value in evals)
    return f"M: {said:30}E: {numbers:40}B: {best}" if padded else f"M: {said} E: {numbers} B: {best}"


def policy_line(sample: PolicySample, *, padded: bool = False) -> str:
    fen, moves, evals, best = sample
    prompt = f"P: {fen:90}" if padded else f"P: {fen} "
    return prompt + policy_completion(moves, evals, best, padded=padded)


def environment_completion(next_fen: str, reward: float, terminated: bool, truncated: bool) -> str:
    return f"{next_fen}+{reward}+{terminated:d}+{truncated:d}"


def environment_line(sample: EnvironmentSample) -> str:
    return environment_prompt(*sample[:3]) + environment_completion(*sample[3:])


def boards(count: int, seed: int = 0) -> list[chess.Board]:
    """Positions of random games, none over, no two alike."""
    rng, board = random.Random(seed), chess.Board()
    found: dict[str, chess.Board] = {}
    while len(found) < count:
        board = chess.Board() if board.is_game_over() or board.ply() > 60 else board
        board.push(rng.choice(list(board.legal_moves)))
        if board.ply() > 4 and not board.is_game_over():
            found[board.epd()] = board.copy()
    return list(found.values())


def game_lines(num_policy: int, num_environment: int, seed: int = 0) -> list[str]:
    """RookWorld lines, both tasks on the same positions, shuffled together."""
    rng, lines = random.Random(seed), []
    positions = boards(max(num_policy, num_environment), seed)
    for board in positions[:num_policy]:
        moves = [move.uci() for move in board.legal_moves][:5]
        evals = tuple(rng.randint(-300, 300) / 100 for _ in moves)
        best = moves[evals.index(max(evals))]
        lines.append(policy_line(PolicySample(board.fen(), tuple(moves), evals, best), padded=True))
    for board in positions[:num_environment]:
        history = [move.uci() for move in board.move_stack[-9:]]
        action = next(iter(board.legal_moves)).uci()
        answer = referee(board.fen(), action)
        lines.append(environment_line(EnvironmentSample(board.fen(), action, (*history, action), *answer)))
    rng.shuffle(lines)
    return lines


def parse_line(line: str) -> PolicySample | EnvironmentSample:
    """Returns the content of a whole line, padded or not. AssertionError for one that is not well formed."""
    if line.startswith("P:"):
        fen, label, rest = line[2:].partition("M:")
        moves = parse_policy_completion(label + rest)
        assert moves.well_formed, line
        return PolicySample(fen.strip(), moves.moves, moves.evals, moves.best)  # type: ignore[arg-type]
    fen, action, history, rest = line.removeprefix("A:").split("+", 3)
    answer = parse_environment_completion(rest)
    assert line.startswith("A:") and answer.well_formed, line
    told = answer.next_fen, answer.reward, answer.terminated, answer.truncated
    return EnvironmentSample(fen.strip(), action, tuple(history.split()), *told)  # type: ignore[arg-type]


def write(path: Path, rows: Iterable[Any]) -> str:
    """A file of lines; what is no text is written as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


write_records = write


def source_of(*, seed: int = 0, **texts: list[str]) -> PromptSource:
    """Returns prompts with these texts, by task."""
    prompts = [Prompt("", text, {"task": task}) for task, several in texts.items() for text in several]
    source = PromptSource(prompts.__getitem__, seed=seed)
    for number, prompt in enumerate(prompts):
        source.add(number, prompt)
    return source


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]
