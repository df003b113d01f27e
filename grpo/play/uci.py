"""The engine's side of the Universal Chess Interface (Meyer-Kahlen, April 2006), for any chess program.

Lines are read in one thread; another loads the model and thinks, and it alone says `bestmove`: so `isready`
and `stop` are obeyed while the model writes. Whatever a line holds, the next one is read. Left out: hash
tables, pondering, `searchmoves`, and all else that a search would want.
"""

import os
import re
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

import chess
from loguru import logger

from grpo.config.groups import Precision
from grpo.errors import UserError
from grpo.play.thought import MOST_ANSWERS, GamePosition, IllegalMoves, MoveChoice, choose_move, game_seed
from grpo.rewards import MATE_SCORE

if TYPE_CHECKING:
    from grpo.play.player import Player

WRONG_MODEL = 2
"""Exit status."""
MOST_SEED = 2**31 - 1
_COMMANDS = {"uci", "isready", "ucinewgame", "setoption", "position", "go", "stop", "quit"}
_OPTIONS: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "Temperature": ("temperature", float, "string default {:g}"),
    "Seed": ("seed", int, f"spin default {{}} min 0 max {MOST_SEED}"),
    "IllegalMoves": ("illegal_moves", str, "combo default {} var replace var resign"),
}
"""By an option's name, the field it sets, what reads its value, and how UCI declares it."""
_NUMBERS = {"movetime", "wtime", "btime", "winc", "binc", "nodes"}
_OVERHEAD_S, _RESERVE_S = 0.03, 0.1
"""Between a move here and its arrival on the GUI's clock: usually, and where there is no time to lose."""
_LONGEST_MATE = 100
"""In moves; an eval that says more is no mate."""
_A_POSITION = "8/8/8/4k3/8/4K3/8/4R3 w - - 0 1"


@dataclass(frozen=True)
class Options:
    """Options that the command line sets, and `setoption` after it."""

    temperature: float = 0.0
    """The sampling temperature; 0 is greedy."""
    seed: int = 0
    """The seed of sampling, and of moves at random."""
    illegal_moves: IllegalMoves = "replace"
    """An illegal answer is replaced by the model's next candidate, by what it says asked again, at last by a
    move at random, or it resigns."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature is {self.temperature:g}: give 0 (greedy) or more")
        if not 0 <= self.seed <= MOST_SEED:
            raise UserError(f"seed is {self.seed}: give a whole number from 0 to {MOST_SEED}")
        if self.illegal_moves not in get_args(IllegalMoves):
            raise UserError(f"illegal moves are {self.illegal_moves!r}: give replace or resign")

    def changed(self, words: Sequence[str]) -> "Options":
        """Returns the options after `name NAME value VALUE`. ValueError for an unknown name or value."""
        wanted, _, value = " ".join(words[1:]).partition(" value ")
        for name, (field, read, _) in _OPTIONS.items():
            if name.lower() == wanted.lower():
                return replace(self, **{field: read(value)})
        raise UserError(f"there is no option {wanted!r}")


def read_position(words: Sequence[str]) -> chess.Board:
    """Reads `startpos` or `fen FEN`, then `moves MOVE …`. ValueError for what is no position."""
    start, _, moves = " ".join(words).partition(" moves")
    kind, _, fen = start.partition(" ")
    if kind not in ("startpos", "fen"):
        raise UserError("say position startpos, or position fen FEN")
    board = chess.Board(fen) if kind == "fen" else chess.Board()
    if not board.is_valid():
        raise UserError(f"{board.fen()} is no legal position ({board.status()!r})")
    for move in moves.split():
        board.push_uci(move)
    return board


def read_go(words: Sequence[str]) -> dict[str, int]:
    """Reads the numbers of `go` and ignores the rest: a GUI whose `go` is refused waits for ever.

    Depths and mates mean nothing here, and a node is an answer.
    """
    pairs = ((word, value) for word, value in pairwise(words) if word in _NUMBERS)
    return {word: int(value) for word, value in pairs if re.fullmatch(r"-?\d{1,11}", value, re.ASCII)}


def seconds_for(numbers: Mapping[str, int], turn: chess.Color) -> float:
    """The most seconds for a move; infinite where nothing limits it.

    An answer is no better for more time: the clock only cuts short one that would be late. It has a
    tenth of what is left, or half of what the move adds.
    """
    if "movetime" in numbers:
        return max(0.0, numbers["movetime"] / 1000 - _OVERHEAD_S)
    side = "w" if turn else "b"
    left, added = numbers.get(f"{side}time"), numbers.get(f"{side}inc", 0)
    if left is None:
        return float("inf")
    return max(0.0, min(left / 1000 - _RESERVE_S, max(left / 10, added / 2) / 1000))


def score_of(pawns: float) -> str:
    """An eval as UCI says it: `cp 35`, `mate -2`."""
    hundredths = round(100 * pawns)
    to_mate = MATE_SCORE - abs(hundredths)
    if to_mate <= _LONGEST_MATE:
        return f"mate {max(1, to_mate) * (1 if hundredths > 0 else -1)}"
    return f"cp {hundredths}"


class Engine:
    """A model behind UCI.

    load: called at once, in the thread that thinks. send: takes a line to the GUI; any thread may call it.
    """

    def __init__(
        self, load: "Callable[[], Player]", send: Callable[[str], None], *, name: str, options: Options
    ) -> None:
        self._name, self._send, self._options = name, send, options
        self._board, self._game = chess.Board(), 0
        self._replaced: defaultdict[int, Counter[str]] = defaultdict(Counter)
        """By the seed of a game, how moves came about that were not the model's first answer."""
        self._stop, self._is_infinite = threading.Event(), False
        """Whether the last search is to stop, which `stop`, `quit` and the next `go` say, and is endless."""
        self._thinking = ThreadPoolExecutor(1, "thinking")
        self._player = self._thinking.submit(load)

    def run(self, lines: Iterable[str]) -> None:
        """Obey lines until `quit`; where they end without it, when all that they ask for is answered."""
        for line in lines:
            words = line.split()
            while words and words[0] not in _COMMANDS:
                words.pop(0)  # the protocol wants unknown words skipped
            if words[:1] == ["quit"]:
                self._stop.set()
                self._thinking.shutdown(wait=False)
                return
            try:
                self._obey(words)
            except ValueError as error:
                self._send(as_info(f"not obeyed, {line.strip()}: {error}"))
        if self._is_infinite:
            self._stop.set()
        self._thinking.shutdown()

    def _obey(self, words: Sequence[str]) -> None:
        match words:
            case ["uci", *_]:
                options = (
                    f"option name {name} type {declaration.format(getattr(self._options, field))}"
                    for name, (field, _, declaration) in _OPTIONS.items()
                )
                for line in (f"id name {self._name}", "id author grpo-lean", *options, "uciok"):
                    self._send(line)
            case ["isready", *_]:
                self._player.add_done_callback(lambda _: self._send("readyok"))
            case ["ucinewgame", *_]:
                self._game += 1
            case ["setoption", *rest]:
                self._options = self._options.changed(rest)
            case ["position", *rest]:
                self._board = read_position(rest)
            case ["stop", *_]:
                self._stop.set()
            case ["go", *rest]:
                self._stop.set()  # of a GUI that does not wait: each `go` has its answer, one after the other
                self._stop, self._is_infinite = threading.Event(), "infinite" in rest
                position = GamePosition(self._board, game_seed(self._options.seed, self._game))
                self._thinking.submit(
                    self._answer,
                    position,
                    self._options,
                    read_go(rest),
                    self._is_infinite,
                    time.monotonic(),
                    self._stop,
                )

    def _answer(
        self,
        position: GamePosition,
        options: Options,
        numbers: Mapping[str, int],
        is_infinite: bool,
        begun: float,
        stop: threading.Event,
    ) -> None:
        """Says `bestmove`, in the other thread and whatever happens, as a GUI waits for it."""
        deadline = begun + seconds_for(numbers, position.board.turn)
        thought = MoveChoice(None, "best")
        if any(position.board.legal_moves):
            try:
                thought = self._player.result().think(
                    [position],
                    temperature=options.temperature,
                    replace=options.illegal_moves == "replace",
                    most_answers=max(1, numbers.get("nodes", MOST_ANSWERS)),
                    stopped=lambda: stop.is_set() or time.monotonic() > deadline,
                )[0]
            except Exception as error:
                logger.exception("thinking about {}", position.board.fen())
                self._send(as_info(f"error: {error}"))
                thought = choose_move(position, [], replace=True)
        played = "(none)" if thought.move is None else thought.move.uci()
        effort = f"nodes {thought.answers} time {round(1000 * (time.monotonic() - begun))}"
        for place, (move, pawns) in enumerate(thought.evals.items(), start=1):
            score = "" if pawns is None else f"score {score_of(pawns)} "
            self._send(f"info depth 1 multipv {place} {score}{effort} pv {move.uci()}")
        if thought.how != "best":
            reason = (
                f"illegal answer {', '.join(thought.illegal)}" if thought.illegal else "no answer in time"
            )
            replaced = self._replaced[position.seed]
            replaced[thought.how] += 1
            counts = ", ".join(f"{move_kind} {count}" for move_kind, count in replaced.items())
            self._send(as_info(f"{reason}: {thought.how} {played} (in this game: {counts})"))
        if is_infinite:
            stop.wait()
        self._send(f"bestmove {played}")


def as_info(text: str) -> str:
    """Returns a text for people, on one line."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f"info string {line[:300]}"


def serve(model: str, device: str, options: Options, precision: Precision | None = None) -> None:
    """Be an engine on stdin and stdout, of which stdout is UCI's alone: all else goes to stderr.

    The process ends where the model cannot be loaded.
    """
    lines = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    sending = threading.Lock()

    def send(line: str) -> None:
        with sending, suppress(BrokenPipeError):  # the program is gone, and so will its lines be
            lines.write(f"{line}\n")

    def load() -> "Player":
        try:
            from grpo.play.player import make_player  # takes seconds, which `uci` need not wait for
            from grpo.run.trained import TrainedModel

            player = make_player(TrainedModel.of(model, device, precision=precision), rows=1)
            player.think([GamePosition(chess.Board(_A_POSITION), seed=0)], most_answers=1)  # the slowest
            return player
        except Exception as error:
            send(as_info(f"error: {error}"))
            logger.error("{}", error)
            logger.opt(exception=error).debug("loading")
            os._exit(WRONG_MODEL)

    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    Engine(load, send, name=f"grpo-lean {model}", options=options).run(sys.stdin)
