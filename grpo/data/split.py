"""Which side of the held-out split a position is on: a property of the position, not of the data."""

import hashlib
from collections.abc import Iterable

import chess

from grpo.prompt import Prompt

HELDOUT_SHARE = 0.05


def is_heldout(fen: str, share: float = HELDOUT_SHARE) -> bool:
    """Whether a position belongs to the held-out side: a property of the position alone.

    Only placement, side to move, castling and en passant count, not the move counters.
    """
    return _fraction(_first_fields(fen)) < share


def split(prompts: Iterable[Prompt], share: float, heldout_count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts, both in the order they came.

    Of each task at most `heldout_count` are held out, those of the lowest hashes, so that the
    choice depends on neither seed nor order; the other prompts of the held-out side are dropped:
    their positions may not be trained on.
    """
    train: list[Prompt] = []
    hashed: list[tuple[float, int, Prompt]] = []
    for index, prompt in enumerate(prompts):
        fraction = heldout_fraction(prompt)
        if fraction < share:
            hashed.append((fraction, index, prompt))
        else:
            train.append(prompt)
    chosen: list[tuple[int, Prompt]] = []
    taken: dict[str, int] = {}
    for _, index, prompt in sorted(hashed, key=lambda entry: entry[:2]):
        taken[prompt.task] = taken.get(prompt.task, 0) + 1
        if taken[prompt.task] <= heldout_count:
            chosen.append((index, prompt))
    return train, [prompt for _, prompt in sorted(chosen, key=lambda entry: entry[0])]


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
