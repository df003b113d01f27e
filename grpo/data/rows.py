"""One row of data becomes prompts, or a ValueError with the reason why it cannot.

Rows are RookWorld lines, records of columns, bare positions or games. An environment line's answer is
ignored, and of a policy line's labels only the best must be legal: the referee and the engine know better.
"""

import json
import math
import random
from collections.abc import Sequence
from typing import Any

import chess
import chess.pgn

from grpo.data.maker import Columns, RowParser, other_columns
from grpo.errors import UserError
from grpo.prompt import Prompt
from grpo.rewards import (
    CASTLING_ALIASES,
    MAX_HISTORY,
    canonical_uci,
    environment_prompt,
    is_move,
    parse_policy_completion,
    policy_prompt,
)

Question = tuple[str, dict[str, Any]]
"""The text and the columns of a prompt."""


def from_record(record: Columns, row_id: str, maker: RowParser) -> list[Prompt]:
    """Makes the prompts of a row of columns.

    The first of `prompt`, `text` (a RookWorld line) and `fen` that has a value says what is asked, unless the
    settings do. The other columns are kept for the rewards.
    """
    if maker.has_own_columns or record.get("prompt") is not None:
        return [maker.render_prompt(row_id, record)]
    name = next((name for name in ("text", "fen") if record.get(name) is not None), None)
    if name is None:
        raise UserError(
            f"none of the columns `prompt`, `text`, `fen` has a value: name one of {', '.join(record)} with "
            "--prompt-column"
        )
    if not isinstance(record[name], str):
        raise UserError(f"`{name}` is {type(record[name]).__name__}, not text")
    others = other_columns(record, name)
    text, columns = _line(record[name], maker) if name == "text" else _position(record, maker)
    return [Prompt(row_id, text, others | columns)]


def from_line(line: str, row_id: str, maker: RowParser) -> list[Prompt]:
    """Makes the prompts of a line of text, which is its row's only column."""
    return from_record({"text": line.rstrip("\r\n")}, row_id, maker)


def from_json(line: str, row_id: str, maker: RowParser) -> list[Prompt]:
    """Makes the prompts of a JSON object, whose keys are the columns."""
    try:
        record = json.loads(line, parse_float=finite)
    except RecursionError:
        raise UserError("nested too deep") from None
    if not isinstance(record, dict):
        raise UserError(f"not a JSON object: {line[:60]!r}")
    return from_record(record, row_id, maker)


def finite(text: str) -> float:
    """Returns the number. ValueError for one like 1e400, which would come out as infinity."""
    if math.isinf(number := float(text)):
        raise UserError(f"{text} is beyond the largest number, about 1.8e308")
    return number


def from_position(line: str, row_id: str, maker: RowParser) -> list[Prompt]:
    """Makes two prompts of a FEN or EPD line: what to play there, and what one random legal move leads to.

    The move is drawn with the position as the seed, so that a held-out set is the same in all runs.
    """
    fields = line.split()
    if len(fields) >= 6 and fields[4].isdecimal() and fields[5].isdecimal():
        board = chess.Board(" ".join(fields[:6]))
    else:
        board, _ = chess.Board.from_epd(line.strip())
    fen = board.fen()
    policy = Prompt(f"{row_id}:policy", *_policy(board, fen, None, maker))
    moves = sorted(move.uci() for move in board.legal_moves)
    move = random.Random(f"move {fen}").choice(moves)
    return [policy, Prompt(f"{row_id}:environment", *_environment(board, fen, move, [move]))]


def from_game(game: chess.pgn.Game, row_id: str, maker: RowParser) -> list[Prompt]:
    """Makes prompts of all positions of a game's main line, and of all its moves with their real history.

    Ids count half-moves: "games.pgn:3.17:policy" is what to play after 17 of them in game 3.
    """
    if game.errors:
        raise UserError(str(game.errors[0]))
    board = game.board()
    if board.uci_variant != "chess" or board.chess960:
        raise UserError("not standard chess")
    moves = list(game.mainline_moves())
    if not all(moves):
        raise UserError("there is a null move in it")
    prompts: list[Prompt] = []
    for ply in range(len(moves) + 1):
        fen, row = board.fen(), f"{row_id}.{ply}"
        if moves and not board.is_game_over():
            prompts.append(Prompt(f"{row}:policy", *_policy(board, fen, None, maker)))
        if ply < len(moves):
            history = [move.uci() for move in moves[: ply + 1][-MAX_HISTORY:]]
            prompts.append(Prompt(f"{row}:environment", *_environment(board, fen, history[-1], history)))
            board.push(moves[ply])
    return prompts


# ---------------------------------------------------------------------------------------- questions


def _line(line: str, maker: RowParser) -> Question:
    """Parses a RookWorld line, padded or not; everything after the prompt may be missing.

    An environment line may lack its `A:`, as all in the published datasets do, if it is whole.
    """
    line = line.strip()
    if line.startswith("P:"):
        return _policy_line(line, maker)
    fields = line.removeprefix("A:").split("+")
    if not (line.startswith("A:") or (len(fields) == 7 and fields[0].count("/") == 7)):
        raise UserError(
            f"a RookWorld line starts with 'P:' or 'A:', not {line[:10]!r}; plain prompts are taken from a "
            ".jsonl, .csv or .parquet file with a column `prompt`"
        )
    if len(fields) != 7 and (len(fields) != 4 or fields[3]):
        raise UserError(f"an environment line has seven fields joined by '+', this one {len(fields)}")
    fen, board = _set_up(fields[0])
    return _environment(board, fen, fields[1].strip(), fields[2].split())


def _policy_line(line: str, maker: RowParser) -> Question:
    fen, label, rest = line[2:].partition("M:")
    fen, board = _set_up(fen)
    if not label:
        return _policy(board, fen, None, maker)
    answer = parse_policy_completion(label + rest)
    if not answer.well_formed:
        raise UserError(f"moves, evals or best move missing or malformed: {rest[:60]!r}")
    text, columns = _policy(board, fen, (answer.moves, answer.evals), maker)
    best = canonical_uci(board, answer.best), max(columns["evals"])
    maker.num_labelled += 1
    maker.num_upside_down += best not in zip(columns["moves"], columns["evals"], strict=True)
    return text, columns


def _set_up(text: str) -> tuple[str, chess.Board]:
    """A line's FEN without its padding, and the position. All six fields have to be there."""
    fen = " ".join(text.split())
    if len(fen) > 100 or not fen.isascii() or fen.count(" ") != 5:
        raise UserError(f"not a FEN: {fen[:100]!r}")
    return fen, chess.Board(fen)


def _position(record: Columns, maker: RowParser) -> Question:
    """Parses a record with a column `fen`."""
    board = chess.Board(record["fen"])
    if (action := record.get("action")) is None:
        moves, evals = _entries(record.get("moves")), _entries(record.get("evals"))
        return _policy(board, board.fen(), (moves, evals) if moves or evals else None, maker)
    history = _entries(record.get("history")) or [action]
    if canonical_uci(board, str(history[-1])) != canonical_uci(board, str(action)):
        raise UserError(f"`history` ends with the action: {history[-1]!r} is not {action!r}")
    return _environment(board, board.fen(), action, history)


def _entries(value: Any) -> list[Any]:
    """Parses a list, or a text of words."""
    entries = value.split() if isinstance(value, str) else value or []
    if not isinstance(entries, list):
        raise UserError(f"expected a list, not {str(value)[:60]!r}")
    return entries


def _policy(
    board: chess.Board, fen: str, labels: tuple[Sequence[Any], Sequence[Any]] | None, maker: RowParser
) -> Question:
    """labels: moves and their evals."""
    if not board.is_valid():
        raise UserError(f"not a possible position: {fen} ({board.status().name})")
    if board.is_game_over():
        raise UserError(f"the game is over in {fen}")
    moves, evals = (None, None) if labels is None else _labels(board, *labels)
    columns = {"task": "policy", "fen": fen, "moves": moves, "evals": evals}
    return policy_prompt(fen, trailing_space=maker.settings.trailing_space), columns


def _labels(board: chess.Board, moves: Sequence[Any], evals: Sequence[Any]) -> tuple[list[str], list[float]]:
    _check_moves(moves)
    try:
        numbers = [float(number) for number in evals]
    except (TypeError, OverflowError) as error:
        raise UserError(str(error)) from None
    if len(moves) != len(numbers) or not numbers:
        raise UserError(f"{len(moves)} moves and {len(numbers)} evals: expected one eval a move")
    if not all(map(math.isfinite, numbers)):
        raise UserError(f"evals are finite numbers of pawns, not {numbers}")
    best = moves[numbers.index(max(numbers))]
    if not board.is_legal(chess.Move.from_uci(best)):
        raise UserError(f"the best label, {best}, is illegal in {board.fen()}")
    return [canonical_uci(board, move) for move in moves], numbers


def _environment(board: chess.Board, fen: str, action: Any, history: Sequence[Any]) -> Question:
    """history: moves up to the action."""
    moves = list(history)[-MAX_HISTORY:]
    _check_moves([action, *moves])
    action, moves = canonical_uci(board, action), _usual_history(board, moves)
    columns = {"task": "environment", "fen": fen, "action": action, "history": moves}
    return environment_prompt(fen, action, moves), columns


def _check_moves(moves: Sequence[Any]) -> None:
    if not all(isinstance(move, str) and is_move(move) for move in moves):
        raise UserError(f"not all UCI moves: {list(moves)}")


def _usual_history(board: chess.Board, moves: Sequence[str]) -> list[str]:
    """Moves up to the one about to be made, as `canonical_uci` writes them.

    Those before are taken back one by one: after castling the king is there, and the rook's corner is empty.
    """
    if not CASTLING_ALIASES.keys() & set(moves):
        return list(moves)
    usual, earlier = [canonical_uci(board, text) for text in moves[-1:]], board.copy(stack=False)
    for text in reversed(moves[:-1]):
        king = chess.Move.from_uci(CASTLING_ALIASES.get(text, text))
        corner = chess.parse_square(text[2:4])
        if earlier.piece_at(corner) is None and earlier.piece_type_at(king.to_square) == chess.KING:
            text = king.uci()
        earlier.set_piece_at(king.from_square, earlier.remove_piece_at(chess.parse_square(text[2:4])))
        usual.append(text)
    return usual[::-1]
