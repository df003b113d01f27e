"""The engine's side of the Universal Chess Interface (Meyer-Kahlen, April 2006), for any chess program.

Lines are read in one thread, and the model is loaded and asked in another, so that `isready` and `stop` are
answered while it writes. Whatever a line holds, the next one is read. Left out: hash tables, pondering
unasked, and all else that a search would want.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import chess
from loguru import logger

from grpo.play.requests import Go, Options, read_position
from grpo.play.thought import MOST_ANSWERS, How, Position, Thought, conclude, game_seed
from rewards.formats import legal_move

_INSTEAD: dict[How, str] = {
    "candidate": "its candidate {} instead", "again": "asked again, it plays {}", "random": "at random {}",
    "resigned": "it resigns",
}  # fmt: skip
_LONGEST_LINE = 300


class Thinker(Protocol):
    """Who is asked for moves: `grpo.play.player.Player`."""

    def think(
        self,
        positions: Sequence[Position],
        *,
        temperature: float | None = None,
        replace: bool = True,
        most_answers: int = MOST_ANSWERS,
        stopped: Callable[[], bool] | None = None,
    ) -> list[Thought]: ...


@dataclass
class _Search:
    """One `go`, from when it is said until `bestmove` is."""

    position: Position
    go: Go
    options: Options
    thinker: "Future[Thinker]"
    """As it was then: one that is to be loaded later is loaded after this."""
    replaced: Counter[How]
    """How moves of its game came about that were not the model's first answer."""
    begun: float = field(default_factory=time.monotonic)
    stop: threading.Event = field(default_factory=threading.Event)
    may_answer: threading.Event = field(default_factory=threading.Event)
    """Not before it is stopped, where it is infinite."""
    answered: threading.Lock = field(default_factory=threading.Lock)
    """Held from then on."""

    def is_over(self) -> bool:
        seconds = self.go.seconds(self.position.board.turn)
        return self.stop.is_set() or (seconds is not None and self.seconds > seconds)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.begun

    def end(self) -> None:
        self.stop.set()
        self.may_answer.set()


class Engine:
    """A model behind UCI.

    load: makes the thinker for a device; called in another thread, at once and when `Device` changes.
    send: takes a line to the GUI, one at a time. fail: told why there is no model to begin with.
    """

    def __init__(
        self,
        load: Callable[[str], Thinker],
        send: Callable[[str], None],
        *,
        name: str,
        options: Options,
        fail: Callable[[Exception], None],
    ) -> None:
        self._load, self._name, self._fail = load, name, fail
        self._to_gui, self._sending = send, threading.Lock()
        self._first_options = self._options = options
        self._board, self._game = chess.Board(), 0
        self._replaced: Counter[How] = Counter()
        self._searches: list[_Search] = []
        self._worker = ThreadPoolExecutor(1, "thinking")
        self._thinker: Future[Thinker] = self._worker.submit(self._load_first)
        self._commands: dict[str, Callable[[Sequence[str]], None]] = {
            "uci": self._introduce, "isready": self._ready, "ucinewgame": self._new_game,
            "position": self._set_position, "go": self._go, "setoption": self._set_option,
            "stop": self._stop, "ponderhit": self._ponder_hit,
        }  # fmt: skip

    def run(self, lines: Iterable[str]) -> None:
        """Obey lines until `quit`; where they end without it, when all that they ask for is answered."""
        for line in lines:
            words = line.split()
            while words and words[0] not in self._commands and words[0] != "quit":
                words.pop(0)  # the protocol wants unknown words skipped
            if words and words[0] == "quit":
                self._stop([])
                self._worker.shutdown(wait=False, cancel_futures=True)
                return
            if words:
                try:
                    self._commands[words[0]](words[1:])
                except ValueError as error:
                    self._say(f"not obeyed, {line.strip()}: {error}")
        for search in self._searches:
            if search.go.infinite:
                search.end()
        self._worker.shutdown()

    def _send(self, line: str) -> None:
        with self._sending:
            self._to_gui(line)

    def _say(self, text: str) -> None:
        """To people, on one line."""
        line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
        self._send(f"info string {line[:_LONGEST_LINE]}")

    # ------------------------------------------------------------------------------------ what lines ask for

    def _introduce(self, _: Sequence[str]) -> None:
        declared = self._first_options.declared()
        for line in (f"id name {self._name}", "id author grpo-lean", *declared, "uciok"):
            self._send(line)

    def _ready(self, _: Sequence[str]) -> None:
        self._thinker.add_done_callback(lambda _: self._send("readyok"))

    def _new_game(self, _: Sequence[str]) -> None:
        self._game += 1
        self._replaced = Counter()

    def _set_option(self, words: Sequence[str]) -> None:
        before, self._options = self._options, self._options.changed(words)
        if self._options.Device != before.Device:
            self._thinker = self._worker.submit(self._load_again, self._options.Device, self._thinker)

    def _set_position(self, words: Sequence[str]) -> None:
        self._board = read_position(words)

    def _go(self, words: Sequence[str]) -> None:
        go, board = Go.read(words), self._board.copy()
        allowed = tuple(move for word in go.searchmoves if (move := legal_move(board, word)) is not None)
        position = Position(board, game_seed(self._options.Seed, self._game), allowed)
        search = _Search(position, go, self._options, self._thinker, self._replaced)
        if not go.infinite:
            search.may_answer.set()
        for earlier in self._searches:  # of a GUI that does not wait: each has its answer
            earlier.end()
        self._searches = [*(each for each in self._searches if not each.answered.locked()), search]
        self._worker.submit(self._search, search)

    def _stop(self, _: Sequence[str]) -> None:
        for search in self._searches:
            search.end()
            if not search.thinker.done():
                self._answer(search, conclude(search.position, [], replace=True))

    def _ponder_hit(self, _: Sequence[str]) -> None:
        for search in self._searches:
            search.may_answer.set()

    # ---------------------------------------------------------------------------------- in the other thread

    def _load_first(self) -> Thinker:
        try:
            return self._load(self._options.Device)
        except Exception as error:
            self._say(f"error: {error}")
            self._fail(error)
            raise

    def _load_again(self, device: str, before: "Future[Thinker]") -> Thinker:
        try:
            return self._load(device)
        except (ValueError, RuntimeError) as error:
            self._say(f"error: {error}")
            return before.result()

    def _search(self, search: _Search) -> None:
        """Answer, whatever happens: a GUI waits for it."""
        position, options = search.position, search.options
        try:
            thought = search.thinker.result().think(
                [position], temperature=options.Temperature, replace=options.IllegalMoves == "replace",
                most_answers=max(1, search.go.nodes or MOST_ANSWERS), stopped=search.is_over,
            )[0] if any(position.board.legal_moves) else Thought(None, "best", ())  # fmt: skip
        except Exception as error:
            logger.exception("thinking about {}", position.board.fen())
            self._say(f"error: {error}")
            thought = conclude(position, [], replace=True)
        if not search.answered.locked():
            self._show(search, thought)
        search.may_answer.wait()
        self._answer(search, thought)

    def _show(self, search: _Search, thought: Thought) -> None:
        """What the model was thinking of: the move first, by its own evals."""
        answers, milliseconds = len(thought.answers), round(1000 * search.seconds)
        for place, (line, score) in enumerate(((line, line.score) for line in thought.lines), start=1):
            told = f"score {score} " if score else ""
            self._send(
                f"info depth 1 multipv {place} {told}nodes {answers} time {milliseconds} pv {line.move.uci()}"
            )

    def _answer(self, search: _Search, thought: Thought) -> None:
        """`bestmove`, once."""
        if not search.answered.acquire(blocking=False):
            return
        played = "(none)" if thought.move is None else thought.move.uci()
        if thought.how != "best":
            search.replaced[thought.how] += 1
            late = "none of searchmoves" if search.position.allowed else "no answer in time"
            faults = f"illegal answer {', '.join(thought.faults)}" if thought.faults else late
            counts = ", ".join(f"{how} {count}" for how, count in search.replaced.items())
            self._say(f"{faults}: {_INSTEAD[thought.how].format(played)} (in this game: {counts})")
        self._send(f"bestmove {played}")
