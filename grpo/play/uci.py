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
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, get_args

import chess
from loguru import logger

from grpo.play.thought import MOST_ANSWERS, How, IllegalMoves, Position, Thought, conclude, game_seed

if TYPE_CHECKING:
    from grpo.play.player import Player

WRONG_MODEL = 2
"""Exit status."""
MOST_SEED = 2**31 - 1
_COMMANDS = {"uci", "isready", "ucinewgame", "setoption", "position", "go", "stop", "quit"}
_READ: dict[str, tuple[str, Callable[[str], Any]]] = {
    "temperature": ("temperature", float),
    "seed": ("seed", int),
    "illegalmoves": ("illegal_moves", str),
}
"""By an option's name, the field it sets, and what reads it."""
_NUMBERS = {"movetime", "wtime", "btime", "winc", "binc", "nodes"}
_OVERHEAD_S, _RESERVE_S = 0.03, 0.1
"""Between a move here and its arrival on the GUI's clock: usually, and where there is no time to lose."""
_INSTEAD: dict[How, str] = {
    "candidate": "its candidate {} instead",
    "again": "asked again, it plays {}",
    "random": "at random {}",
    "resigned": "it resigns",
}
_A_POSITION = "8/8/8/4k3/8/4K3/8/4R3 w - - 0 1"


@dataclass(frozen=True)
class Options:
    """What the command line sets, and `setoption` after it."""

    temperature: float = 0.0
    """Of sampling; 0 is greedy."""
    seed: int = 0
    """Of sampling, and of moves at random."""
    illegal_moves: IllegalMoves = "replace"
    """An illegal answer is replaced by the model's next candidate, by what it says asked again, at last by a
    move at random, or it resigns."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature:g}: give 0 (greedy) or more")
        if not 0 <= self.seed <= MOST_SEED:
            raise ValueError(f"seed is {self.seed}: give a whole number from 0 to {MOST_SEED}")
        if self.illegal_moves not in get_args(IllegalMoves):
            raise ValueError(f"illegal moves are {self.illegal_moves!r}: give replace or resign")

    def declared(self) -> list[str]:
        choices = " ".join(f"var {choice}" for choice in get_args(IllegalMoves))
        return [
            f"option name Temperature type string default {self.temperature:g}",
            f"option name Seed type spin default {self.seed} min 0 max {MOST_SEED}",
            f"option name IllegalMoves type combo default {self.illegal_moves} {choices}",
        ]

    def changed(self, words: Sequence[str]) -> "Options":
        """By `name NAME value VALUE`. ValueError for what there is not, or cannot be."""
        split = words.index("value") if "value" in words else len(words)
        name, value = " ".join(words[1:split]), " ".join(words[split + 1 :])
        if name.lower() not in _READ:
            raise ValueError(f"there is no option {name!r}")
        field, read = _READ[name.lower()]
        return replace(self, **{field: read(value)})


def read_position(words: Sequence[str]) -> chess.Board:
    """By `startpos` or `fen FEN`, then `moves MOVE …`. ValueError for what is no position."""
    split = words.index("moves") if "moves" in words else len(words)
    if words[:1] not in (["startpos"], ["fen"]):
        raise ValueError("say position startpos, or position fen FEN")
    board = chess.Board(" ".join(words[1:split])) if words[0] == "fen" else chess.Board()
    if not board.is_valid():
        raise ValueError(f"{board.fen()} is no legal position ({board.status()!r})")
    for word in words[split + 1 :]:
        board.push_uci(word)
    return board


def read_go(words: Sequence[str]) -> dict[str, int]:
    """The numbers of `go`. What is none is left out: a GUI whose `go` was refused would wait for ever.

    Depths and mates mean nothing here, and a node is an answer.
    """
    pairs = ((word, value) for word, value in pairwise(words) if word in _NUMBERS)
    return {word: int(value) for word, value in pairs if re.fullmatch(r"-?\d{1,11}", value, re.ASCII)}


def seconds_for(go: dict[str, int], turn: chess.Color) -> float | None:
    """For a move, at most; None: as long as it takes.

    An answer is no better for more time: the clock only cuts short one that would be late. It has a
    tenth of what is left, or half of what the move adds.
    """
    if "movetime" in go:
        return max(0.0, go["movetime"] / 1000 - _OVERHEAD_S)
    side = "w" if turn else "b"
    left, added = go.get(f"{side}time"), go.get(f"{side}inc", 0)
    if left is None:
        return None
    return max(0.0, min(left / 1000 - _RESERVE_S, max(left / 10, added / 2) / 1000))


@dataclass(frozen=True)
class Search:
    """One `go`, and all that counts for its answer."""

    position: Position
    numbers: dict[str, int]
    is_infinite: bool
    options: Options
    replaced: Counter[How]
    """How moves of this game came about that were not the model's first answer."""
    begun: float
    stop: threading.Event

    def is_over(self) -> bool:
        seconds = seconds_for(self.numbers, self.position.board.turn)
        return self.stop.is_set() or (seconds is not None and time.monotonic() - self.begun > seconds)


class Engine:
    """A model behind UCI.

    load: called at once, in the thread that thinks. send: takes a line to the GUI; any thread may call it.
    """

    def __init__(
        self, load: "Callable[[], Player]", send: Callable[[str], None], *, name: str, options: Options
    ) -> None:
        self._introduction = [f"id name {name}", "id author grpo-lean", *options.declared(), "uciok"]
        self._send, self._options = send, options
        self._board, self._game = chess.Board(), 0
        self._replaced: Counter[How] = Counter()
        self._search: Search | None = None
        self._thinking = ThreadPoolExecutor(1, "thinking")
        self._player = self._thinking.submit(load)

    def run(self, lines: Iterable[str]) -> None:
        """Obey lines until `quit`; where they end without it, when all that they ask for is answered."""
        for line in lines:
            words = line.split()
            while words and words[0] not in _COMMANDS:
                words.pop(0)  # the protocol wants unknown words skipped
            if words[:1] == ["quit"]:
                self._stop()
                self._thinking.shutdown(wait=False)
                return
            try:
                self._obey(words)
            except ValueError as error:
                self._send(as_info(f"not obeyed, {line.strip()}: {error}"))
        if self._search is not None and self._search.is_infinite:
            self._stop()
        self._thinking.shutdown()

    def _obey(self, words: Sequence[str]) -> None:
        match words:
            case ["uci", *_]:
                for line in self._introduction:
                    self._send(line)
            case ["isready", *_]:
                self._player.add_done_callback(lambda _: self._send("readyok"))
            case ["ucinewgame", *_]:
                self._game, self._replaced = self._game + 1, Counter()
            case ["setoption", *rest]:
                self._options = self._options.changed(rest)
            case ["position", *rest]:
                self._board = read_position(rest)
            case ["stop", *_]:
                self._stop()
            case ["go", *rest]:
                self._stop()  # of a GUI that does not wait: each `go` has its answer, one after the other
                position = Position(self._board, game_seed(self._options.seed, self._game))
                self._search = Search(
                    position, read_go(rest), "infinite" in rest, self._options, self._replaced,
                    begun=time.monotonic(), stop=threading.Event(),
                )  # fmt: skip
                self._thinking.submit(self._answer, self._search)

    def _stop(self) -> None:
        if self._search is not None:
            self._search.stop.set()

    def _answer(self, search: Search) -> None:
        """In the other thread: `bestmove`, whatever happens, as a GUI waits for it."""
        thought = Thought(None, "best")
        if any(search.position.board.legal_moves):
            thought = self._think(search)
        played = "(none)" if thought.move is None else thought.move.uci()
        effort = f"nodes {thought.answers} time {round(1000 * (time.monotonic() - search.begun))}"
        for place, line in enumerate(thought.lines, start=1):  # the move first, by its own evals
            score = f"score {line.score} " if line.score else ""
            self._send(f"info depth 1 multipv {place} {score}{effort} pv {line.move.uci()}")
        if thought.how != "best":
            search.replaced[thought.how] += 1
            faults = f"illegal answer {', '.join(thought.faults)}" if thought.faults else "no answer in time"
            counts = ", ".join(f"{how} {count}" for how, count in search.replaced.items())
            self._send(as_info(f"{faults}: {_INSTEAD[thought.how].format(played)} (in this game: {counts})"))
        if search.is_infinite:
            search.stop.wait()
        self._send(f"bestmove {played}")

    def _think(self, search: Search) -> Thought:
        try:
            return self._player.result().think(
                [search.position], temperature=search.options.temperature, stopped=search.is_over,
                replace=search.options.illegal_moves == "replace",
                most_answers=max(1, search.numbers.get("nodes", MOST_ANSWERS)),
            )[0]  # fmt: skip
        except Exception as error:
            logger.exception("thinking about {}", search.position.board.fen())
            self._send(as_info(f"error: {error}"))
        return conclude(search.position, [], replace=True)


def as_info(text: str) -> str:
    """What people are to read, on one line."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f"info string {line[:300]}"


def serve(model: str, device: str, options: Options) -> None:
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
            from grpo.play.player import load_player  # takes seconds, which `uci` need not wait for

            player = load_player(model, device, rows=1)
            player.think([Position(chess.Board(_A_POSITION), seed=0)], most_answers=1)  # the slowest
            return player
        except Exception as error:
            send(as_info(f"error: {error}"))
            logger.error("{}", error)
            logger.opt(exception=error).debug("loading")
            os._exit(WRONG_MODEL)

    sys.stdin.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    Engine(load, send, name=f"grpo-lean {model}", options=options).run(sys.stdin)
