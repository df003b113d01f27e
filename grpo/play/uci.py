"""The engine's side of the Universal Chess Interface (Meyer-Kahlen, April 2006), for any chess program.

Lines are read in one thread; another thinks, and it alone says `bestmove`: so `isready` and `stop` are obeyed
while the model writes. Whatever a line holds, the next one is read. Left out: hash tables, pondering,
`searchmoves`, and all else that a search would want.
"""

import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import TYPE_CHECKING

import chess
from loguru import logger

from grpo.play.requests import Options, read_go, read_position, seconds_for
from grpo.play.thought import MOST_ANSWERS, How, Position, Thought, conclude, game_seed

if TYPE_CHECKING:
    from grpo.play.player import Player

WRONG_MODEL = 2
"""Exit status."""
_COMMANDS = {"uci", "isready", "ucinewgame", "setoption", "position", "go", "stop", "quit"}
_INSTEAD: dict[How, str] = {
    "candidate": "its candidate {} instead", "again": "asked again, it plays {}", "random": "at random {}",
    "resigned": "it resigns",
}  # fmt: skip
_A_POSITION = "8/8/8/4k3/8/4K3/8/4R3 w - - 0 1"


class Engine:
    """A model behind UCI.

    load: called at once, in a thread of its own. send: takes a line to the GUI; any thread may call it.
    """

    def __init__(
        self, load: "Callable[[], Player]", send: Callable[[str], None], *, name: str, options: Options
    ) -> None:
        self._introduction = [f"id name {name}", "id author grpo-lean", *options.declared(), "uciok"]
        self._send, self._options, self._board, self._game = send, options, chess.Board(), 0
        self._replaced: Counter[How] = Counter()
        """How moves of this game came about that were not the model's first answer."""
        self._stop, self._is_infinite = threading.Event(), False
        self._loading, self._thinking = (ThreadPoolExecutor(1, work) for work in ("loading", "thinking"))
        self._player = self._loading.submit(load)

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
        self._loading.shutdown()

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
                self._stop.set()
            case ["go", *rest]:
                self._go(rest)

    def _go(self, words: Sequence[str]) -> None:
        begun = time.monotonic()
        self._stop.set()  # of a GUI that does not wait: each `go` has its answer first,
        self._thinking.submit(int).result()  # for which this stands in line
        self._stop.clear()
        self._is_infinite = "infinite" in words
        position, go = Position(self._board, game_seed(self._options.seed, self._game)), read_go(words)
        self._thinking.submit(self._answer, position, go, self._options, self._replaced, begun)

    def _answer(
        self, position: Position, go: dict[str, int], options: Options, replaced: Counter[How],
        begun: float,
    ) -> None:  # fmt: skip
        """In the other thread: `bestmove`, whatever happens, as a GUI waits for it."""
        thought = Thought(None, "best")
        if any(position.board.legal_moves):
            thought = self._think(position, go, options, begun)
        played = "(none)" if thought.move is None else thought.move.uci()
        told = f"nodes {thought.answers} time {round(1000 * (time.monotonic() - begun))}"
        for place, line in enumerate(thought.lines, start=1):  # the move first, by its own evals
            score = f"score {line.score} " if line.score else ""
            self._send(f"info depth 1 multipv {place} {score}{told} pv {line.move.uci()}")
        if thought.how != "best":
            replaced[thought.how] += 1
            faults = f"illegal answer {', '.join(thought.faults)}" if thought.faults else "no answer in time"
            counts = ", ".join(f"{how} {count}" for how, count in replaced.items())
            self._send(as_info(f"{faults}: {_INSTEAD[thought.how].format(played)} (in this game: {counts})"))
        if self._is_infinite:
            self._stop.wait()
        self._send(f"bestmove {played}")

    def _think(self, position: Position, go: dict[str, int], options: Options, begun: float) -> Thought:
        seconds = seconds_for(go, position.board.turn)

        def is_over() -> bool:
            return self._stop.is_set() or (seconds is not None and time.monotonic() - begun > seconds)

        try:
            while not self._player.done() and not is_over():
                wait([self._player], timeout=0.02)
            if self._player.done():
                return self._player.result().think(
                    [position], temperature=options.temperature, replace=options.illegal_moves == "replace",
                    most_answers=max(1, go.get("nodes", MOST_ANSWERS)), stopped=is_over,
                )[0]  # fmt: skip
        except Exception as error:
            logger.exception("thinking about {}", position.board.fen())
            self._send(as_info(f"error: {error}"))
        return conclude(position, [], replace=True)


def as_info(text: str) -> str:
    """What people are to read, on one line."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
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
