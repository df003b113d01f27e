"""`grpo-lean uci` as a chess program has it: whole games by the clock, the time it takes to start and stop,
and lines that no program should send."""

import random
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import chess
import chess.engine

from grpo.data.load import POSITIONS

ENDGAME = "8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56"
ONE_MOVE = "8/8/8/8/8/1k6/8/K7 w - - 0 80"
"""From a1 to b1."""
_WORDS = """
uci isready ucinewgame position go stop setoption ponderhit debug register startpos fen moves name value
searchmoves wtime btime winc binc movetime nodes depth mate movestogo infinite ponder Temperature Seed
IllegalMoves resign replace e2e4 e7e5 0000 a1a1 e7e8q -1 0 1 1e5 99999999999999 nan 8/8/8/8/8/8/8/8 w b - = %s
\x00 \ufffd ♞ {} <b> \x1b[31m
"""


def nonsense(rng: random.Random) -> str:
    """A malformed line, or one out of order; never `quit`."""
    kind = rng.random()
    if kind < 0.1:
        text = "".join(chr(rng.randrange(1, 0x3000)) for _ in range(rng.randrange(200)))
        return " ".join(text.replace("quit", "").splitlines())
    if kind < 0.12:
        return "position startpos moves " + "e2e4 " * 20_000
    if kind < 0.3:
        return rng.choice(
            (f"position fen {ENDGAME}", "position startpos", "go movetime 1", "stop", "isready")
        )
    return " ".join(rng.choices(_WORDS.split(), k=rng.randrange(1, 12)))


def command(model: str) -> list[str]:
    """That a chess program starts."""
    return [sys.executable, str(Path(__file__).with_name("grpo_lean.py")), "uci", "--model", model]


def play_games(
    engine: chess.engine.SimpleEngine, games: int, *, seed: int, clock_s: float, added_s: float
) -> tuple[int, int]:
    """Whole games against random moves, in either colour in turn, of the start and of endgames in turn.

    Returns the engine's moves, and after how many of them its clock stood below zero. python-chess logs
    errors of the protocol as warnings.
    """
    rng, moves, late = random.Random(seed), 0, 0
    lines = (POSITIONS / "heldout.txt").read_text().splitlines()
    fens = [line.split("M:")[0][3:].strip() for line in lines if line.startswith("P:")]
    for game in range(games):
        board = chess.Board() if game % 4 < 2 else chess.Board(rng.choice(fens))
        ours, clock = game % 2 == 0, clock_s
        while board.outcome(claim_draw=False) is None and not board.is_repetition(3):
            if board.turn != ours:
                board.push(rng.choice(list(board.legal_moves)))
                continue
            left = max(0.001, clock)
            limit = chess.engine.Limit(
                white_clock=left, black_clock=left, white_inc=added_s, black_inc=added_s
            )
            begun = time.monotonic()
            result = engine.play(board, limit, game=game, info=chess.engine.INFO_ALL)
            clock -= time.monotonic() - begun
            moves, late, clock = moves + 1, late + (clock < 0), clock + added_s
            assert result.move in board.legal_moves, f"{result.move} in {board.fen()}"
            board.push(result.move)
    return moves, late


def stop_times(engine: chess.engine.SimpleEngine, times: int) -> list[float]:
    """Seconds from `stop` to `bestmove`, sent at any moment of an answer."""
    rng, found = random.Random(0), []
    for _ in range(times):
        with engine.analysis(chess.Board(ENDGAME)) as analysis:
            time.sleep(rng.random() / 2)
            begun = time.monotonic()
            analysis.stop()
            analysis.wait()
            found.append(time.monotonic() - begun)
    return found


def answers(model: str, lines: Sequence[str], *flags: object) -> list[str]:
    """Returns the engine's answers to these lines, all of it UCI; it ends well where they end."""
    words = [*command(model), *map(str, flags)]
    text = "\n".join(lines).encode(errors="replace")
    ended = subprocess.run(words, input=text, capture_output=True, timeout=120, check=True)
    answered = ended.stdout.decode().splitlines()
    firsts = {line.split(" ")[0] for line in answered}
    assert firsts <= {"id", "option", "uciok", "readyok", "info", "bestmove"}, answered
    return answered
