"""UCI as a GUI sees it: lines in, lines out; in place of the model somebody who takes as long as told."""

import random
import threading
import time
from contextlib import contextmanager

import chess
import pytest
from benchmarks.uci import ENDGAME, nonsense

from grpo.play.requests import Go, Options, read_position
from grpo.play.thought import conclude, read_answer
from grpo.play.uci import Engine


class Somebody:
    """Writes `text`, after `seconds` or when stopped."""

    def __init__(self, text: str = "M: e2e4 d2d4 E: 0.3 0.1 B: e2e4", seconds: float = 0.0) -> None:
        self.text, self.seconds, self.asked = text, seconds, []

    def think(self, positions, *, replace=True, stopped=None, **asked):
        self.asked.append((positions[0], replace, asked))
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not stopped():
            time.sleep(0.001)
        if stopped() and self.seconds:
            return [conclude(positions[0], [], replace=replace)]
        return [conclude(positions[0], [read_answer(positions[0], self.text)], replace=replace)]


class Gui:
    """Says lines, one by one or all at once, and keeps what is answered."""

    def __init__(self, thinker=None, load=None, options: Options | None = None) -> None:
        self.said: list[str] = []
        self.failed: list[Exception] = []
        self.engine = Engine(
            load or (lambda device: thinker), self.said.append, name="test", options=options or Options(),
            fail=self.failed.append,
        )  # fmt: skip

    def say(self, *lines: str) -> list[str]:
        """What is answered, when all has been."""
        self.engine.run(lines)
        return self.said

    def wait_for(self, words: str) -> None:
        end = time.monotonic() + 10
        while not any(words in line for line in self.said):
            assert time.monotonic() < end, self.said
            time.sleep(0.001)


def test_it_introduces_itself_and_its_options():
    said = Gui(Somebody(), options=Options(Temperature=0.7, IllegalMoves="resign")).say("uci", "isready")
    assert said == [
        "id name test", "id author grpo-lean",
        "option name Temperature type string default 0.7",
        "option name Seed type spin default 0 min 0 max 2147483647",
        "option name Device type string default auto",
        "option name IllegalMoves type combo default resign var replace var resign",
        "uciok", "readyok",
    ]  # fmt: skip


def test_its_move_and_its_candidates_are_said_with_their_evals():
    said = Gui(Somebody()).say("position startpos", "go")
    assert [" ".join(line.split()[:8]) for line in said[:2]] == [
        "info depth 1 multipv 1 score cp 30", "info depth 1 multipv 2 score cp 10",
    ]  # fmt: skip
    assert said[0].endswith("pv e2e4") and said[1].endswith("pv d2d4") and said[-1] == "bestmove e2e4"


def test_an_illegal_answer_is_said_and_counted_until_the_next_game():
    somebody = Somebody("M: d2d4 E: 0.1 B: e2e5")
    said = Gui(somebody).say("go", "go", "ucinewgame", "go")
    strings = [line for line in said if line.startswith("info string")]
    assert strings[0] == (
        "info string illegal answer e2e5: its candidate d2d4 instead (in this game: candidate 1)"
    )
    assert "(in this game: candidate 1)" in strings[-1] and said.count("bestmove d2d4") == 3
    said = Gui(somebody).say("setoption name IllegalMoves value resign", "go")
    assert said[-2:] == [
        "info string illegal answer e2e5: it resigns (in this game: resigned 1)", "bestmove (none)",
    ]  # fmt: skip


def test_options_and_the_game_reach_who_thinks():
    somebody = Somebody()
    Gui(somebody).say(
        "setoption name temperature value 0.5", "setoption name Seed value 3", "go nodes 2",
        "ucinewgame", "go searchmoves d2d4 xyz",
    )  # fmt: skip
    (first, replaced, asked), (second, _, _) = somebody.asked
    assert replaced and asked == {"temperature": 0.5, "most_answers": 2}
    assert first.seed != second.seed
    assert [move.uci() for move in second.allowed] == ["d2d4"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("setoption name Hash value 16", "there is no option 'Hash'"),
        ("setoption", "there is no option ''"),
        ("setoption name Temperature value warm", "could not convert"),
        ("setoption name Temperature value -1", "give 0 (greedy) or more"),
        ("setoption name Seed value 1e3", "give a whole number"),
        ("setoption name IllegalMoves value cheat", "give replace or resign"),
        ("position", "say position startpos"),
        ("position fen 8/8/8/8 w - - 0 1", "expected 8 rows"),
        ("position fen 8/8/8/8/8/8/8/8 w - - 0 1", "no legal position"),
        ("position startpos moves e2e5", "illegal uci"),
        ("position startpos moves \x00", "expected uci string"),
    ],
)
def test_what_cannot_be_obeyed_is_said_and_nothing_else_changes(line, reason):
    said = Gui(Somebody()).say("position startpos moves e2e4 e7e5", line, "go searchmoves g1f3")
    assert said[0].startswith("info string not obeyed") and reason in said[0]
    assert said[-1] == "bestmove g1f3"


def test_castling_may_be_written_by_the_rooks_square():
    thinker = Somebody("M: e1h1 E: 0.3 B: e1h1")
    gui = Gui(thinker)
    gui.say("position fen r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1", "go searchmoves e1h1 e1e2")
    assert gui.said[-1] == "bestmove e1g1"
    said = Gui(thinker).say("position fen r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1 moves e1h1 e8a8", "go")
    assert said[-1].startswith("bestmove ")


def test_unknown_words_are_skipped_as_the_protocol_wants():
    assert Gui(Somebody()).say("joho isready", "", "   ", "debug on", "xyzzy") == ["readyok"]


class Lines:
    """Lines as they come."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: list[str] = []

    def say(self, *lines: str) -> None:
        with self._changed:
            self._lines += lines
            self._changed.notify()

    def __iter__(self):
        return self

    def __next__(self) -> str:
        with self._changed:
            assert self._changed.wait_for(lambda: self._lines, 20)
            return self._lines.pop(0)


@contextmanager
def talking_to(gui: Gui):
    """A GUI that says lines while the engine thinks; at the end it says `quit`, and the engine ends."""
    lines = Lines()
    reading = threading.Thread(target=gui.engine.run, args=(lines,))
    reading.start()
    yield lines.say
    lines.say("quit")
    reading.join(10)
    assert not reading.is_alive()


def test_stop_and_isready_are_answered_while_it_thinks():
    gui = Gui(Somebody(seconds=60))
    with talking_to(gui) as say:
        say("go", "isready")
        gui.wait_for("readyok")
        assert not any("bestmove" in line for line in gui.said)
        say("stop")
        gui.wait_for("bestmove")
        assert any("no answer in time: at random" in line for line in gui.said)
        say("go infinite")  # and quit


def test_an_infinite_search_waits_for_stop_and_pondering_for_the_move():
    for words, end in (("go infinite", "stop"), ("go ponder wtime 1000 btime 1000", "ponderhit")):
        gui = Gui(Somebody())
        with talking_to(gui) as say:
            say("isready", words)
            gui.wait_for("multipv 2")
            assert not any("bestmove" in line for line in gui.said)
            say(end)
            gui.wait_for("bestmove e2e4")


def test_each_go_is_answered_once_even_of_a_gui_that_does_not_wait():
    gui = Gui(Somebody(seconds=60))
    with talking_to(gui) as say:
        say("isready", "stop", *["go"] * 5, "stop", "stop")
        end = time.monotonic() + 10
        while sum("bestmove" in line for line in gui.said) < 5:
            assert time.monotonic() < end, gui.said
    assert sum("bestmove" in line for line in gui.said) == 5


def test_stop_is_answered_while_the_model_is_still_loaded():
    loaded = threading.Event()

    def load(device):
        loaded.wait(20)
        return Somebody()

    gui = Gui(load=load)
    with talking_to(gui) as say:
        say("uci", "go", "stop")
        gui.wait_for("bestmove")
        assert "uciok" in gui.said and "readyok" not in gui.said
        loaded.set()
        say("isready")
        gui.wait_for("readyok")
    assert sum("bestmove" in line for line in gui.said) == 1


def test_a_model_that_cannot_be_loaded_is_told_of():
    def load(device):
        raise ValueError("there is no such folder.")

    gui = Gui(load=load)
    gui.say("uci")
    assert [str(error) for error in gui.failed] == ["there is no such folder."]
    assert "info string error: there is no such folder." in gui.said


def test_another_device_is_loaded_or_the_one_before_stays():
    devices = []

    def load(device):
        devices.append(device)
        if device == "cuda":
            raise ValueError("device is 'cuda', which cannot be used here")
        return Somebody()

    said = Gui(load=load).say(
        "setoption name Device value cuda", "go", "setoption name Device value cpu", "go"
    )
    assert devices == ["auto", "cuda", "cpu"] and said.count("bestmove e2e4") == 2
    assert "info string error: device is 'cuda', which cannot be used here" in said


def test_whatever_goes_wrong_in_thinking_there_is_a_move():
    class Broken(Somebody):
        def think(self, positions, **asked):
            raise RuntimeError("out of memory")

    said = Gui(Broken()).say("go")
    assert "info string error: out of memory" in said and said[-1].startswith("bestmove ")


def test_a_game_that_is_over_has_no_move():
    assert Gui(Somebody()).say("position fen 7k/5QQ1/8/8/8/8/8/K7 b - - 0 1", "go")[-1] == "bestmove (none)"


@pytest.mark.parametrize(
    ("words", "turn", "seconds"),
    [
        ("", True, None), ("infinite", True, None), ("depth 3", True, None),
        ("movetime 1030", True, 1.0), ("movetime -5", False, 0.0),
        ("wtime 60000 btime 30000", True, 6.0), ("wtime 60000 btime 30000", False, 3.0),
        ("wtime 1000 winc 500 btime 1", True, 0.25), ("wtime 1000 winc 500 btime 1", False, 0.0),
        ("wtime 130 winc 5000", True, 0.03),  # the increment comes after the move
        ("movetime soon wtime", True, None),
    ],
)  # fmt: skip
def test_the_clock_cuts_short_what_would_be_late(words, turn, seconds):
    assert Go.read(words.split()).seconds(turn) == (None if seconds is None else pytest.approx(seconds))


def test_positions_are_read_as_guis_write_them():
    assert read_position(["startpos"]) == chess.Board()
    board = read_position(f"fen {ENDGAME} moves a6a5".split())
    assert board.fen() == "8/8/8/R6p/P2K2k1/7r/8/8 b - - 1 56"
    assert read_position(["fen", *["8/8/R7/7p/P2K2k1/7r/8/8", "w"]]).turn  # some leave out the rest


def test_a_thousand_bad_lines_neither_end_nor_hang_it():
    rng = random.Random(0)
    lines = [nonsense(rng) for _ in range(1000)]
    gui = Gui(Somebody())
    gui.say(*lines, "stop", "setoption name IllegalMoves value replace", "position startpos", "ucinewgame",
            "isready", "go")  # fmt: skip
    assert gui.said[-1] == "bestmove e2e4" and not gui.failed
    assert all(line == " ".join(line.split()) and line.isprintable() for line in gui.said)
    assert {line.split()[0] for line in gui.said} <= {"id", "option", "uciok", "readyok", "info", "bestmove"}
