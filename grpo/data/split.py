"""Which side of the held-out split a position is on: a property of the position, not of the data."""

import hashlib
import heapq
from collections.abc import Iterable

import chess

from grpo.prompt import Prompt

HELDOUT_SHARE = 0.05


def lowest_hashes(prompts: Iterable[Prompt], count: int) -> list[Prompt]:
    """At most `count` of each task, in the order they came; which ones depends on neither seed nor order."""
    by_task: dict[str, list[tuple[float, int, Prompt]]] = {}
    for place, prompt in enumerate(prompts):
        by_task.setdefault(prompt.task, []).append((heldout_fraction(prompt), place, prompt))
    chosen = [entry for entries in by_task.values() for entry in heapq.nsmallest(count, entries)]
    return [prompt for _, _, prompt in sorted(chosen, key=lambda entry: entry[1])]


def heldout_fraction(prompt: Prompt) -> float:
    """Where in [0, 1] the prompt's position hashes to."""
    return _fraction(position(prompt))


def position(prompt: Prompt) -> str:
    """The first four fields of the prompt's FEN, or its text where it has none."""
    fen = prompt.columns.get("fen")
    if not isinstance(fen, str) or not fen.strip():
        return prompt.text
    if _first_fields(fen).endswith(" -"):
        return _first_fields(fen)
    try:  # an en-passant square that nobody can use is written by some and left out by others
        return _first_fields(chess.Board(fen).fen())
    except ValueError:
        return _first_fields(fen)


def _first_fields(fen: str) -> str:
    return " ".join(fen.split()[:4])


def _fraction(key: str) -> float:
    return int.from_bytes(hashlib.sha256(key.encode(errors="surrogatepass")).digest()[:8]) / 2**64
