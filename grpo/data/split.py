"""Which side of the held-out split a position is on: a property of the position, not of the data."""

import hashlib
from contextlib import suppress

import chess

from grpo.prompt import Prompt

HELDOUT_SHARE = 0.05


def heldout_fraction(prompt: Prompt) -> float:
    """Where in [0, 1] the prompt's position hashes to."""
    key = position(prompt).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.sha256(key).digest()[:8]) / 2**64


def position(prompt: Prompt) -> str:
    """The first four fields of the prompt's FEN, or its text where it has none."""
    fen = prompt.columns.get("fen")
    if not isinstance(fen, str) or not fen.strip():
        return prompt.text
    if fen.split()[3:4] != ["-"]:  # an en-passant square that nobody can use: some tools leave it out
        with suppress(ValueError):
            fen = chess.Board(fen).fen()
    return " ".join(fen.split()[:4])
