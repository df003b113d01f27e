"""The two texts of RookWorld-LM: prompts as they are written, completions as they are read.

A policy sample asks for moves, an environment sample for the next state:

    P: {fen} M: {up to five moves} E: {their evals} B: {best}
    A: {fen}+{move}+{recent moves}+{new fen}+{reward}+{terminated}+{truncated}

Evals are in pawns from the side to move. The published data pads the policy's fields with spaces
to fixed widths; the bundled model is trained without padding. Completions are parsed
leniently: what is missing is None, and nothing a model can write raises.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import chess

MAX_HISTORY = 10

CASTLING_ALIASES = {"e1h1": "e1g1", "e1a1": "e1c1", "e8h8": "e8g8", "e8a8": "e8c8"}
"""Castling by the rook's square, and by the king's step."""

_MOVE = re.compile(r"[a-h][1-8][a-h][1-8][qrbn]?")
_NUMBER = re.compile(r"[+-]?(\d{1,9}\.\d{0,9}|\.?\d{1,9})", re.ASCII)
_LABEL = re.compile(r"([MEB]:)")


@dataclass(frozen=True)
class PolicyCompletion:
    """A completion of `P: {fen}`, field by field.

    Entries that are not a UCI move, or not a finite number, are None. `best` is "" where the
    field is missing. `in_order` means M:, E: and B: once each, in that order, nothing before.
    `well_formed` means: in order, every entry parsed, at least one move, one eval a move.
    """

    moves: tuple[str | None, ...]
    evals: tuple[float | None, ...]
    best: str
    in_order: bool

    @property
    def well_formed(self) -> bool:
        return (
            self.in_order
            and 0 < len(self.moves) == len(self.evals)
            and None not in self.moves
            and None not in self.evals
            and self.best != ""
        )


@dataclass(frozen=True)
class EnvironmentCompletion:
    """A completion of `A: {fen}+{action}+{history}+`. A field it got wrong is None."""

    next_fen: str
    reward: float | None
    terminated: bool | None
    truncated: bool | None
    num_fields: int

    @property
    def well_formed(self) -> bool:
        return (
            self.num_fields == 4
            and is_fen(self.next_fen)
            and None not in (self.reward, self.terminated, self.truncated)
        )


def policy_prompt(fen: str, *, trailing_space: bool = False) -> str:
    """The text a model completes with moves.

    Byte-pair encodings merge runs of spaces, so whether the prompt ends in one changes its tokens.
    """
    return f"P: {fen}" + " " * trailing_space


def environment_prompt(fen: str, action: str, history: Sequence[str]) -> str:
    """`history` holds the recent moves, `action` last; the ten newest are written."""
    return f"A: {fen}+{action}+{' '.join(history[-MAX_HISTORY:])}+"


def is_move(text: str) -> bool:
    """Whether `text` has the shape of a UCI move. The null move `0000` has not."""
    return _MOVE.fullmatch(text) is not None


def as_move(text: str) -> chess.Move | None:
    """The move, or None: what has a move's shape may lead from a square to itself."""
    try:
        return chess.Move.from_uci(text) if is_move(text) else None
    except ValueError:
        return None


def legal_move(board: chess.Board, text: str) -> chess.Move | None:
    """The move, where it is one in this position; castling also by the rook's square, e1h1."""
    try:
        return board.parse_uci(text) if as_move(text) else None
    except ValueError:
        return None


def canonical_uci(board: chess.Board, text: str) -> str:
    """A legal move as all here write it, castling by the king's step (e1g1); any other text as it is.

    Moves that come in are written so before they are compared as text.
    """
    move = legal_move(board, text) if text in CASTLING_ALIASES else None
    return text if move is None else move.uci()


def is_fen(text: str) -> bool:
    """Whether `text` is a FEN of six fields that python-chess can set up (legal or not)."""
    if len(text) > 100 or not text.isascii():
        return False
    fields = text.split()
    if len(fields) != 6 or not (fields[4] + fields[5]).isdigit():  # int() would also take "1_0"
        return False
    try:
        chess.Board(text)
    except ValueError:
        return False
    return True


def parse_number(text: str) -> float | None:
    """A finite decimal number, or None: no exponents, no underscores, no `nan`, ASCII digits."""
    return float(text) if _NUMBER.fullmatch(text) else None


def parse_policy_completion(text: str) -> PolicyCompletion:
    """Never raises. White space around fields and between entries does not matter.

    Of a field written twice the first counts, and the completion is not well formed.
    """
    before, *parts = _LABEL.split(text)  # before, label, field, label, field, ...
    labels, contents = parts[::2], parts[1::2]
    fields = dict(zip(reversed(labels), reversed(contents), strict=True))
    best = fields.get("B:", "").strip()
    return PolicyCompletion(
        moves=tuple(move if is_move(move) else None for move in fields.get("M:", "").split()),
        evals=tuple(parse_number(number) for number in fields.get("E:", "").split()),
        best=best if is_move(best) else "",
        in_order=not before.strip() and labels == ["M:", "E:", "B:"],
    )


def policy_field(text: str, label: str) -> tuple[int, int]:
    """The letters from `M:`, `E:` or `B:` on, up to the next label; all where there is no such label."""
    labels = list(_LABEL.finditer(text))
    for place, match in enumerate(labels):
        if match.group() == label:
            following = labels[place + 1 : place + 2]
            return match.start(), following[0].start() if following else len(text)
    return 0, len(text)


def environment_field(text: str, first: int, last: int) -> tuple[int, int]:
    """The letters of fields `first` to before `last`, with the `+` behind; all where the text has too few."""
    borders = [0, *(match.end() for match in re.finditer(r"\+", text)), len(text)]
    if len(borders) <= first + 1:
        return 0, len(text)
    return borders[first], borders[min(last, len(borders) - 1)]


def parse_environment_completion(text: str) -> EnvironmentCompletion:
    """Never raises. Fields beyond the fourth are only counted."""
    fields = [field.strip() for field in text.split("+")]
    padded = fields + [""] * (4 - len(fields))
    flags = {"0": False, "1": True}
    return EnvironmentCompletion(
        next_fen=padded[0],
        reward=parse_number(padded[1]),
        terminated=flags.get(padded[2]),
        truncated=flags.get(padded[3]),
        num_fields=len(fields),
    )
