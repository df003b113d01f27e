"""A model at the board: its answers as moves, UCI as a GUI sees it, opponents, matches and their Elo."""

import io
import math
import random
import sys
import threading
import time
from contextlib import contextmanager
from itertools import islice
from queue import SimpleQueue
from unittest import mock

import chess
import chess.engine
import chess.pgn
import numpy as np
import pytest
from uci_client import ENDGAME, nonsense

from grpo.play import opponents
from grpo.play.match import play_games, random_openings
from grpo.play.opponents import RandomPlayer, UciOpponent, engine_command, make_opponent
from grpo.play.record import FILE, Game, Match, Score, elo_difference
from grpo.play.thought import GamePosition, MoveChoice, choose_move, game_seed, random_move, read_answer
from grpo.play.uci import Engine, Options, read_go, read_position, score_of, seconds_for
from rewards.engine import EngineError, find_stockfish

E2E4, D2D4, G1F3 = (chess.Move.from_uci(move) for move in ("e2e4", "d2d4", "g1f3"))
START = GamePosition(chess.Board(), seed=7)


def test_an_answer_is_its_legal_moves_by_their_evals_as_uci_has_them():
    scores = {
        0.35: "cp 35",
        -10.09: "cp -1009",
        999.97: "mate 3",
        -999.99: "mate -1",
        1000.0: "mate 1",
        0.0: "cp 0",
        998.0: "cp 99800",
    }
    assert {value: score_of(value) for value in scores} == scores
    for text, lines in (
        ("M: g1f3 e2e5 d2d4 e2e4 E: -0.1 9.0 0.2 0.35 B: e2e4", [(E2E4, 0.35), (D2D4, 0.2), (G1F3, -0.1)]),
        ("M: e2e4 d2d4 g1f3 g1f3 E: 0.5 0.1 0.2 9.0 B: d2d4", [(D2D4, 0.1), (E2E4, 0.5), (G1F3, 0.2)]),
        ("M: d2d4 g1f3 E: 0.1 B: e2e4", [(E2E4, None), (D2D4, 0.1), (G1F3, None)]),
    ):
        answer = read_answer(START, text)
        assert list(answer.evals.items()) == lines and not answer.illegal
        assert choose_move(START, [answer], replace=True)[:2] == (lines[0][0], "best")


CANDIDATES = read_answer(START, "M: d2d4 g1f3 E: 0.1 0.3 B: e2e5")
NO_MOVE = read_answer(START, "M: e2e5 E: 0.1 B: nothing")
RIGHT = read_answer(START, "M: d2d4 E: 0 B: d2d4")
CUT_SHORT = read_answer(START, "M: d2d4 g1f3 E: 0.1", is_whole=False)


def test_an_illegal_answer_is_replaced_by_the_next_candidate_then_by_asking_again_then_at_random():
    """Chance is the game's and the half-move's. What is cut short is not illegal: nobody resigns."""
    assert (CANDIDATES.illegal, NO_MOVE.illegal, NO_MOVE.evals) == (["e2e5"], ["no move"], {})
    chance = random_move(START)
    for answers, replace, move, how, illegal in (
        ([CANDIDATES], True, G1F3, "candidate", ["e2e5"]),
        ([NO_MOVE, RIGHT], True, D2D4, "again", ["no move"]),
        ([NO_MOVE, NO_MOVE], True, chance, "random", ["no move"] * 2),
        ([CANDIDATES], False, None, "resigned", ["e2e5"]),
        ([NO_MOVE], False, None, "resigned", ["no move"]),
        ([CUT_SHORT], False, D2D4, "candidate", []),
        ([], False, chance, "random", []),
    ):
        thought = choose_move(START, answers, replace=replace)
        assert (thought.move, thought.how, thought.illegal) == (move, how, illegal)
        assert bool(thought.evals) == (how in ("candidate", "again"))
    assert list(CUT_SHORT.evals.values()) == [0.1, None]
    assert len({game_seed(seed, game) for seed in (0, 1) for game in (0, 1)}) == 4
    positions = [GamePosition(chess.Board(), seed) for seed in range(40)]
    drawn = [random_move(position) for position in positions]
    assert drawn == [random_move(position) for position in positions] and len(set(drawn)) > 10


class Somebody:
    """In place of the model: writes `text`, after `seconds` or when stopped."""

    def __init__(self, text: str = "M: e2e4 d2d4 E: 0.3 0.1 B: e2e4", seconds: float = 0.0) -> None:
        self.text, self.seconds, self.asked = text, seconds, []

    def think(self, positions, *, replace=True, stopped=None, **asked):
        self.asked.append((positions[0], replace, asked))
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not stopped():
            time.sleep(0.001)
        answers = [] if stopped() and self.seconds else [read_answer(positions[0], self.text)]
        return [choose_move(positions[0], answers, replace=replace)]


class Gui:
    """Says lines, one by one or all at once, and keeps what is answered."""

    def __init__(self, thinker=None, load=None, options: Options | None = None) -> None:
        self.said: list[str] = []
        self.engine = Engine(
            load or (lambda: thinker), self.said.append, name="test", options=options or Options()
        )

    def say(self, *lines: str) -> list[str]:
        """Returns the answers, when all are there."""
        self.engine.run(lines)
        return self.said

    def wait_for(self, words: str, times: int = 1) -> None:
        end = time.monotonic() + 60
        while sum(words in line for line in self.said) < times:
            assert time.monotonic() < end, self.said
            time.sleep(0.001)


def test_it_introduces_itself_says_its_move_and_candidates_with_evals_and_hands_options_on():
    said = Gui(Somebody(), options=Options(0.7, illegal_moves="resign")).say("uci", "isready")
    assert said == [
        "id name test",
        "id author grpo-lean",
        "option name Temperature type string default 0.7",
        "option name Seed type spin default 0 min 0 max 2147483647",
        "option name IllegalMoves type combo default resign var replace var resign",
        "uciok",
        "readyok",
    ]
    assert Gui(Somebody()).say("joho isready", "", "   ", "debug on", "xyzzy") == ["readyok"]
    *lines, best = Gui(somebody := Somebody()).say("position startpos", "go")
    for line, number, score, move in zip(lines, (1, 2), (30, 10), ("e2e4", "d2d4"), strict=True):
        assert line.startswith(f"info depth 1 multipv {number} score cp {score} ")
        assert line.endswith(f" pv {move}")
    assert best == "bestmove e2e4"
    over = Gui(Somebody()).say("position fen 7k/5QQ1/8/8/8/8/8/K7 b - - 0 1", "go")
    assert over[-1] == "bestmove (none)"
    options = ("setoption name temperature value 0.5", "setoption name Seed value 3")
    Gui(somebody).say(*options, "go nodes 2", "ucinewgame", "go ponder searchmoves d2d4 xyz")
    _, (first, replaced, asked), (second, _, plain) = somebody.asked
    assert replaced and asked == {"temperature": 0.5, "most_answers": 2}
    assert first.seed != second.seed and plain == {"temperature": 0.5, "most_answers": 5}


def test_an_illegal_answer_is_said_and_counted_until_the_next_game():
    somebody = Somebody("M: d2d4 E: 0.1 B: e2e5")
    said = Gui(somebody).say("go", "go", "ucinewgame", "go")
    told = [line for line in said if line.startswith("info string")]
    assert "illegal answer e2e5" in told[0] and "candidate d2d4" in told[0]
    counted = [line.split()[-1].strip(")") for line in told]
    assert counted == ["1", "2", "1"] and said.count("bestmove d2d4") == 3
    *_, told, best = Gui(somebody).say("setoption name IllegalMoves value resign", "go")
    assert "resigned (none) (in this game: resigned 1)" in told and best == "bestmove (none)"


def test_positions_are_read_as_guis_write_them_and_what_cannot_be_obeyed_is_said():
    reasons = {
        "setoption name Hash value 16": "there is no option 'Hash'",
        "setoption": "there is no option ''",
        "setoption name Temperature value warm": "could not convert",
        "setoption name Temperature value -1": "give 0 (greedy) or more",
        "setoption name Seed value 1e3": "invalid literal for int()",
        "setoption name Seed value -1": "give a whole number",
        "setoption name Device value cpu": "no option",
        "setoption name IllegalMoves value cheat": "give replace or resign",
        "position": "say position startpos",
        "position fen 8/8/8/8 w - - 0 1": "expected 8 rows",
        "position fen 8/8/8/8/8/8/8/8 w - - 0 1": "no legal position",
        "position startpos moves e2e5": "illegal uci",
        "position startpos moves \x00": "expected uci string",
    }
    for line, reason in reasons.items():
        said = Gui(Somebody("B: g1f3")).say("position startpos moves e2e4 e7e5", line, "go")
        assert said[0].startswith("info string not obeyed") and reason in said[0]
        assert said[-1] == "bestmove g1f3"
    assert read_position(["startpos"]) == chess.Board()
    board = read_position(f"fen {ENDGAME} moves a6a5".split())
    assert board.fen() == "8/8/8/R6p/P2K2k1/7r/8/8 b - - 1 56"
    assert read_position(["fen", *["8/8/R7/7p/P2K2k1/7r/8/8", "w"]]).turn  # some leave out the rest
    by_rook, castle = Somebody("M: e1h1 E: 0.3 B: e1h1"), "position fen r3k2r/8/8/8/8/8/8/R3K2R w KQkq - 0 1"
    assert Gui(by_rook).say(castle, "go")[-1] == "bestmove e1g1"
    assert Gui(by_rook).say(f"{castle} moves e1h1 e8a8", "go")[-1].startswith("bestmove ")


@contextmanager
def talking_to(gui: Gui):
    """A GUI that says lines while the engine thinks; at the end it says `quit`, and the engine ends."""
    lines = SimpleQueue()
    coming = iter(lambda: lines.get(timeout=120), None)
    reading = threading.Thread(target=gui.engine.run, args=(coming,))
    reading.start()
    yield lambda *said: [lines.put(line) for line in said]
    lines.put("quit")
    reading.join(10)
    assert not reading.is_alive()


def test_stop_and_isready_are_answered_while_it_thinks_and_searches_wait_for_their_end():
    for seconds, words, begun, end, said in (
        (60, ("go", "isready"), "readyok", "stop", "no answer in time: random"),
        (0, ("isready", "go infinite"), "multipv 2", "stop", "bestmove e2e4"),
    ):
        gui = Gui(Somebody(seconds=seconds))
        with talking_to(gui) as say:
            say(*words)
            gui.wait_for(begun)
            assert not any("bestmove" in line for line in gui.said)
            say(end)
            gui.wait_for("bestmove")
            assert any(said in line for line in gui.said)
            say("go infinite")  # and quit


def test_each_go_is_answered_once_even_of_a_gui_that_does_not_wait_while_the_model_is_loaded():
    gui = Gui(Somebody(seconds=60))
    with talking_to(gui) as say:
        say("isready", "stop", *["go"] * 5, "stop", "stop")
        gui.wait_for("bestmove", times=5)
    assert sum("bestmove" in line for line in gui.said) == 5
    loaded = threading.Event()
    gui = Gui(load=lambda: loaded.wait(20) and Somebody())
    with talking_to(gui) as say:
        say("isready", "go", "stop", "uci")
        gui.wait_for("uciok")
        assert not any("readyok" in line or "bestmove" in line for line in gui.said)
        loaded.set()
        gui.wait_for("bestmove")
    assert gui.said.index("readyok") < gui.said.index("bestmove e2e4")


def test_what_breaks_in_thinking_is_told_of_and_answered_all_the_same():
    said = Gui(mock.Mock(think=mock.Mock(side_effect=RuntimeError("out of memory")))).say("go")
    assert "info string error: out of memory" in said and said[-1].startswith("bestmove ")


def test_the_clock_cuts_short_what_would_be_late():
    for words, turn, seconds in (
        ("", True, math.inf),
        ("infinite", True, math.inf),
        ("depth 3", True, math.inf),
        ("movetime 1030", True, 1.0),
        ("movetime soon wtime", True, math.inf),
        ("movetime -5", False, 0.0),
        ("wtime 60000 btime 30000", True, 6.0),
        ("wtime 60000 btime 30000", False, 3.0),
        ("wtime 1000 winc 500 btime 1", True, 0.25),
        ("wtime 1000 winc 500 btime 1", False, 0.0),
        ("wtime 130 winc 5000", True, 0.03),  # the increment comes after the move
    ):
        assert seconds_for(read_go(words.split()), turn) == pytest.approx(seconds), words


def test_a_thousand_bad_lines_neither_end_nor_hang_it():
    rng = random.Random(0)
    gui = Gui(Somebody())
    gui.say(
        *(nonsense(rng) for _ in range(1000)),
        "stop",
        "setoption name IllegalMoves value replace",
        "position startpos",
        "ucinewgame",
        "isready",
        "go",
    )
    assert gui.said[-1] == "bestmove e2e4"
    assert all(line == " ".join(line.split()) and line.isprintable() for line in gui.said)
    assert {line.split()[0] for line in gui.said} <= {"id", "option", "uciok", "readyok", "info", "bestmove"}


def match_of(count: int, seed: int = 1) -> Match:
    settings = {"temperature": 0.5, "start": "openings", "nodes": 3}
    return Match.begin(("a", "b"), settings, random_openings(-(-count // 2), seed=seed), count)


def play(match: Match, *players, seed=5, at_once=6, **options) -> None:
    """To its end."""
    for _ in play_games(match.games, players, seed=seed, at_once=at_once, **options):
        pass


def texts(match: Match) -> list[str]:
    """Its games as PGN."""
    return [game.text for game in match.games]


class Unsure(RandomPlayer):
    """Answers every third position with an illegal move."""

    def think(self, positions, *, replace=True):
        def says(board: chess.Board) -> str:
            return "M: a1a1 B: a1a1" if board.ply() % 3 == 0 else f"B: {next(iter(board.legal_moves))}"

        return [
            choose_move(each, [read_answer(each, says(each.board))], replace=replace) for each in positions
        ]


def test_a_game_ends_by_the_rules_and_by_nothing_else():
    for fen, moves, result, ending, points in (
        (chess.STARTING_FEN, "e2e4 e7e5 d1h5 b8c6 f1c4 g8f6 h5f7", "1-0", "checkmate", 1.0),
        (chess.STARTING_FEN, "g1f3 g8f6 f3g1 f6g8 " * 2, "1/2-1/2", "threefold repetition", 0.5),
        ("8/8/4k3/8/8/4K3/R7/8 w - - 99 80", "a2a3", "1/2-1/2", "fifty moves", 0.5),
        ("8/8/4k3/8/8/4K3/4q3/8 w - - 0 80", "e3e2", "1/2-1/2", "insufficient material", 0.5),
        (chess.STARTING_FEN, "", "0-1", "an illegal answer", 0.0),  # whoever has no move loses
    ):
        for first_is_white in (True, False):
            game = Game.begin(chess.Board(fen), first_is_white=first_is_white)
            for move in moves.split() or [None]:
                assert not game.is_over
                how = "best" if move else "resigned"
                game.play(MoveChoice(move and chess.Move.from_uci(move), how, () if move else ("a1a1",)))
            assert game.illegal(0 if first_is_white else 1) == ([] if moves else [1])
            assert (game.result, game.ending) == (result, ending)
            assert game.points == (points if first_is_white else 1 - points)


def test_two_games_have_one_opening_and_all_are_played_together_whatever_is_beside_them():
    games = match_of(5).games
    assert [game.first_is_white for game in games] == [True, False, True, False, True]
    assert games[0].fen == games[1].fen != games[2].fen == games[3].fen != games[4].fen
    assert [game.turn for game in games[:2]] == [0, 1]
    played = []
    for at_once, seed in ((3, 5), (64, 5), (64, 6)):
        match, watched = match_of(5), mock.Mock(wraps=RandomPlayer())
        shares = list(play_games(match.games, (watched, RandomPlayer()), seed=seed, at_once=at_once))
        assert shares == sorted(shares) and 0 < shares[0] < shares[-1] == 1
        assert all(game.is_over for game in match.games) and match.score.games == 5
        assert max(len(call.args[0]) for call in watched.think.call_args_list) <= at_once
        played.append([game.moves for game in match.games])
    assert played[0] == played[1] != played[2]


def test_a_match_that_was_cut_short_goes_on_to_the_same_games(tmp_path):
    whole, parts = match_of(6), match_of(6)
    for _ in islice(play_games(parts.games, (RandomPlayer(), RandomPlayer()), seed=5, at_once=2), 150):
        pass
    parts.save(tmp_path)
    again = match_of(6).resume_from(tmp_path)
    begun = [len(game.moves) for game in again.games if not game.is_over]
    assert texts(again) == texts(parts) and any(begun) and not all(begun)
    for match in (whole, again):
        play(match, RandomPlayer(), RandomPlayer(), at_once=2)
    again.save(tmp_path)
    assert texts(again) == texts(whole) == texts(Match.load(tmp_path))


def test_illegal_answers_are_counted_of_whoever_gave_them_and_stand_in_the_pgn(tmp_path):
    match = match_of(4)
    play(match, Unsure(), RandomPlayer())
    match.save(tmp_path)
    with io.StringIO((tmp_path / FILE).read_text()) as file:
        read = [chess.pgn.read_game(file) for _ in range(5)]
    assert read.pop() is None
    for game, each in zip(match.games, read, strict=True):
        board, illegal = chess.Board(game.fen), game.illegal(0)
        for ply, move in enumerate(game.moves, start=1):
            assert (ply in illegal) == (board.turn == game.first_is_white and board.ply() % 3 == 0)
            board.push_uci(move)
        assert not each.errors and each.board().fen() == game.fen
        assert [move.uci() for move in each.mainline_moves()] == game.moves
        assert each.headers["Result"] == game.result and each.headers["Termination"] == game.ending
        assert each.headers["White" if game.first_is_white else "Black"] == "a"
        comments = [node.comment for node in each.mainline() if node.comment]
        assert len(comments) == len(illegal) and all("illegal" in comment for comment in comments)
    assert match.illegal_a_game(0) == sum(len(game.illegal(0)) for game in match.games) / 4 > 0
    assert match.illegal_a_game(1) == 0 and match.first_illegal(0) and match.first_illegal(1) is None
    assert texts(Match.load(tmp_path)) == texts(match)
    without = match_of(2)
    play(without, Unsure(), RandomPlayer(), replace=False)
    assert all(game.ending == "an illegal answer" and game.points == 0 for game in without.games)
    without.save(tmp_path)
    assert Match.load(tmp_path).illegal_a_game(0) == without.illegal_a_game(0) == 1


def test_a_match_goes_on_only_as_it_was_begun_whatever_its_settings_are_called(tmp_path):
    """Names and paths that PGN cannot hold are compared as far as it can."""
    named = {"prompts": 'a "b"\nc.txt', "seed": 12, "temperature": 1.0, "nodes": None}
    players = ('uci:x "y"', "b")

    def begun(count: int, seed: int = 1, players=players, settings=named) -> Match:
        return Match.begin(players, settings, random_openings(count // 2, seed=seed), count)

    match = begun(4)
    assert match.resume_from(tmp_path) is match
    match.save(tmp_path)
    again = begun(6).resume_from(tmp_path)
    assert [game.fen for game in again.games] == [game.fen for game in begun(6).games]
    assert again.settings == {"prompts": "a 'b' c.txt", "seed": "12", "temperature": "1.0"}
    again.save(tmp_path)
    for other, reason in (
        (begun(6, players=("a", "b")), "is a match with White uci:x 'y', not a"),
        (begun(6, settings=named | {"nodes": 5}), "is a match with nodes None, not 5"),
        (begun(6, seed=2), "is a match with FEN r.*, not r"),
    ):
        with pytest.raises(ValueError, match=reason):
            other.resume_from(tmp_path)


def test_score_and_interval_are_those_worked_out_by_hand():
    """40 won, 30 drawn, 30 lost: s = 0.55; z² = 3.8415, z²/n = 0.038415; d = 30 / 103.8415 = 0.28890.

    Under the root 0.038415 (0.2475 + 0.0096037 - 0.072225 × 1.038415) = 0.0069953, whose root is 0.083638;
    (0.55 + 0.0192074 ± 0.083638) / 1.038415 = 0.467607 and 0.628694; 400 log10(s / (1 - s)) of these.
    FIDE's table of the same formula: 64 % is a difference of 100, 76 % of 200, 91 % of 400.
    """
    assert [round(elo_difference(share)) for share in (0.64, 0.76, 0.91)] == [100, 200, 402]
    assert elo_difference(0.25) == -elo_difference(0.75) and str(elo_difference(0.5)) == "0.0"
    score = Score(40, 30, 30)
    assert score.games == 100 and score.share == pytest.approx(0.55)
    assert score.interval == pytest.approx((0.467607, 0.628694), abs=2e-5)
    assert elo_difference(score.share) == pytest.approx(34.86, abs=0.01)  # 400 log10(0.55 / 0.45)
    assert [elo_difference(end) for end in score.interval] == pytest.approx([-22.54, 91.47], abs=0.05)
    assert score.elo_in_words() == "+35 (-23 to +91)"
    assert Score(8, 0, 2).interval == pytest.approx((0.4902, 0.9433), abs=1e-4)  # without draws Wilson's
    for few in (Score(10, 0, 0), Score(0, 10, 0), Score(0, 0, 1)):
        low, high = few.interval
        assert high - low > 0.2 and 0 <= low <= few.share <= high <= 1
    assert elo_difference(1.0) == math.inf == -elo_difference(0.0)
    assert Score(10, 0, 0).elo_in_words().startswith("+inf (+1")


def test_games_that_began_alike_count_as_one():
    """Eight pairs in which each start decides both games: eight outcomes, not sixteen."""
    together = Score(8, 0, 8, pairs=(1.0,) * 4 + (0.0,) * 4)
    assert together.interval == pytest.approx(Score(4, 0, 4).interval)
    exchanged = Score(8, 0, 8, pairs=(0.5,) * 8)  # White won every time: no start favours a player
    assert exchanged.interval[0] > Score(8, 0, 8).interval[0] > together.interval[0]


@pytest.mark.parametrize(("games", "chances"), [(20, (0.4, 0.2, 0.4)), (200, (0.85, 0.1, 0.05))])
def test_the_interval_holds_the_truth_in_95_percent_of_matches(games, chances):
    truth = chances[0] + chances[1] / 2
    matches = np.random.default_rng(0).multinomial(games, chances, size=4000).tolist()
    intervals = [Score(*match).interval for match in matches]
    assert 0.94 <= np.mean([low <= truth <= high for low, high in intervals]) <= 0.97


ENGINE = """#!{python}
import sys
import chess

for line in sys.stdin:
    command, *words = line.split()
    if command in ("uci", "isready"):
        print({{"uci": "uciok", "isready": "readyok"}}[command], flush=True)
    elif command == "position":
        at = words.index("moves") if "moves" in words else len(words)
        board = chess.Board() if words[0] == "startpos" else chess.Board(" ".join(words[1:at]))
        for move in words[at + 1:]:
            board.push_uci(move)
    elif command == "go":
        {go}
    elif command == "quit":
        break
"""
"""Stands in for the real ones."""
FIRST_MOVE = 'print("bestmove", min(move.uci() for move in board.legal_moves), flush=True)'


@pytest.fixture
def engine(tmp_path):
    """Writes an engine that plays as told, and says where."""

    def write(go: str = FIRST_MOVE) -> str:
        file = tmp_path / "engine"
        file.write_text(ENGINE.format(python=sys.executable, go=go))
        file.chmod(0o755)
        return str(file)

    return write


def no_model(name: str):
    raise ValueError(f"model is {name!r}: there is no such folder.")


def opponent(name: str, at_once: int = 1):
    return make_opponent(name, chess.engine.Limit(nodes=50), at_once, no_model)


def first_move(name: str) -> str | None:
    with opponent(name) as player:
        (thought,) = player.think([GamePosition(chess.Board(), 0)])
        return thought.move and thought.move.uci()


def test_an_engine_plays_whole_games_several_at_once_and_whoever_is_none_is_a_model(engine, tmp_path):
    path = engine()
    match = Match.begin(("a", "b"), {}, [chess.Board("8/8/4k3/8/8/4K3/R7/8 w - - 80 80")] * 3, 5)
    with opponent(path, at_once=2) as player:
        assert isinstance(player, UciOpponent)
        play(match, RandomPlayer(), player)
    for game in match.games:
        board = chess.Board(game.fen)
        for move in game.moves:
            if board.turn != game.first_is_white:
                assert move == min(each.uci() for each in board.legal_moves)
            board.push_uci(move)
        assert game.is_over
    commands = {path: [path], f"uci:{path} --fast": [path, "--fast"], str(tmp_path): None, "rook-tiny": None}
    assert {name: engine_command(name) for name in commands} == commands
    assert first_move(f"uci:{sys.executable} {path}") == "a2a3"
    with pytest.raises(EngineError, match="not a working UCI engine"):
        first_move("uci:/bin/true")
    with opponent("random") as player:
        assert isinstance(player, RandomPlayer)
    with pytest.raises(ValueError, match="no such folder"):
        first_move("runs/nothing")


NO_TEXT = r'sys.stdout.buffer.write(b"info string \xff\xfe\nbestmove a2a3\n"); sys.stdout.flush()'


def test_an_engine_without_a_move_resigns_and_one_that_breaks_or_hangs_is_told_of(engine, monkeypatch):
    """With the position. It may say what is no text."""
    assert first_move(engine('print("bestmove (none)", flush=True)')) is None
    assert first_move(engine(NO_TEXT)) == "a2a3"
    for go in ("sys.exit(3)", 'print("bestmove e2e5", flush=True)'):
        with pytest.raises(EngineError, match=r"the engine failed on .*rnbqkbnr/pppppppp"):
            first_move(engine(go))
    monkeypatch.setattr(opponents, "PATIENCE_S", 1.0)
    with pytest.raises(EngineError, match=r"the engine failed on .*no answer in 1 s"):
        first_move(engine("import time; time.sleep(60)"))


@pytest.mark.skipif(find_stockfish() is None, reason="Stockfish is not installed")
def test_stockfish_is_limited_by_its_elo():
    assert chess.Move.from_uci(first_move("stockfish:1500")) in chess.Board().legal_moves
    with pytest.raises(ValueError, match=r"stockfish:100, but UCI_Elo of Stockfish .* goes from \d+ to \d+"):
        first_move("stockfish:100")
