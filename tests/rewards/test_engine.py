"""The engine pool: answers that repeat, a cache that lasts, engines that die, hang or never were one."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

import rewards.engine
from rewards.analysis import Analysis
from rewards.engine import EngineError, EnginePool, find_stockfish

ROOK_ENDING = "8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56"
MATE_IN_ONE = "6k1/5ppp/8/8/8/8/8/R3K3 w - - 0 1"
MIDDLEGAMES = [
    "r1bqkbnr/pppp1ppp/2n5/4p3/2B1P3/5N2/PPPP1PPP/RNBQK2R b KQkq - 3 3",
    "r1bq1rk1/ppp2ppp/2np1n2/2b1p3/2B1P3/2PP1N2/PP3PPP/RNBQ1RK1 w - - 0 7",
    "r2q1rk1/pp2bppp/2n1pn2/3p4/3P1B2/2N1PN2/PP3PPP/R2Q1RK1 b - - 2 11",
    "2r2rk1/1bqnbppp/pp1ppn2/8/2PNP3/1PN1BP2/P2QB1PP/2R2RK1 w - - 0 14",
]
needs_engine = pytest.mark.skipif(find_stockfish() is None, reason="Stockfish is not installed")


def pool(**settings) -> EnginePool:
    """One of its own; without Stockfish the test is skipped."""
    if find_stockfish() is None:
        pytest.skip("Stockfish is not installed")
    return EnginePool(**{"depth": 6, "cache_path": ":memory:", **settings})


@pytest.fixture(scope="module")
def engines():
    """One pool for all the questions that harm no engine."""
    with pool() as shared:
        yield shared


def pids(engines: EnginePool) -> list[int]:
    """Returns its processes, when all have started."""
    while None in engines._engines.engines:
        time.sleep(0.01)
    return [engine.transport.get_pid() for engine in engines._engines.engines]


def children() -> set[int]:
    """This process's own, whichever thread started them, and those that nobody waited for."""
    return {child.pid for child in psutil.Process().children()}


def no_more_than(before: set[int]) -> bool:
    """Whether no other child is left, once the threads that wait for ended ones have had their turn."""
    deadline = time.monotonic() + 60
    while not children() <= before and time.monotonic() < deadline:
        time.sleep(0.01)
    return children() <= before  # of which one may have ended meanwhile


def gone_or_zombie(pid: int) -> bool:
    """An orphan's end: whether init has waited for it yet is not ours to say."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_what_is_no_engine_is_an_error_that_left_no_process(monkeypatch):
    for path in ("/no/such/stockfish", "/etc/passwd", "/tmp"):
        with pytest.raises(EngineError, match="apt-get install stockfish"):
            find_stockfish(path)
    monkeypatch.setattr(rewards.engine, "START_TIMEOUT_S", 0.5)
    before = children()
    for path in ("/bin/true", "/bin/cat"):
        with pytest.raises(EngineError, match=f"{path} is not a working UCI engine"):
            EnginePool(path, cache_path=":memory:")
    assert no_more_than(before)


def test_moves_come_best_first_with_evals_in_pawns_of_the_side_to_move(engines: EnginePool):
    (best,) = engines.analyse([MATE_IN_ONE])
    assert (best.moves[0], best.evals[0]) == ("a1a8", 999.99)  # 1000 - 1/100
    assert len(best.moves) == 5 and list(best.evals) == sorted(best.evals, reverse=True)
    # Black is a queen down: bad for the side to move, whoever that is.
    (black,) = engines.analyse(["4k3/8/8/8/8/8/8/3QK3 b - - 0 1"])
    assert max(black.evals) < -3
    for over in (
        "R5k1/5ppp/8/8/8/8/8/4K3 b - - 1 1",
        "k7/2Q5/1K6/8/8/8/8/8 b - - 0 1",
        "8/8/4k3/8/8/3K4/8/8 w - - 0 1",
    ):
        assert engines.submit(over).result(timeout=60) == Analysis((), ())  # mate, stalemate, bare kings


def test_given_moves_are_analysed_and_no_others(engines: EnginePool):
    asked = engines.submit(ROOK_ENDING, ["a6a8", "a6h6", "a6a8"]).result()
    assert sorted(asked.moves) == ["a6a8", "a6h6"] and len(asked.evals) == 2
    with pytest.raises(ValueError, match=r"not legal in .*a6a9.*e2e4"):
        engines.submit(ROOK_ENDING, ["a6a8", "e2e4", "a6a9"])
    assert engines.submit(ROOK_ENDING, ["a6a8"]).result().moves == ("a6a8",)
    castle = "6k1/8/8/8/8/8/8/4K2R w K - 0 1"
    assert engines.submit(castle, ["e1h1"]).result().moves == ("e1g1",)


def test_positions_that_crash_engines_are_refused_before_they_reach_one(engines: EnginePool):
    """No FEN, no kings, one king, Black in check with White to move, a pawn on the last rank."""
    before = pids(engines)
    for fen in (
        "no fen",
        "",
        "8/8/8/8/8/8/8/8 w - - 0 1",
        "8/8/8/8/8/8/8/K7 w - - 0 1",
        "4k3/8/8/8/8/8/8/4R1K1 w - - 0 1",
        "P3k3/8/8/8/8/8/8/4K3 w - - 0 1",
    ):
        with pytest.raises(ValueError):
            engines.submit(fen)
    assert engines.analyse([ROOK_ENDING]) and pids(engines) == before


def test_answers_do_not_depend_on_order_engines_or_threads():
    forward, backward = {}, {}
    for answers, order in ((forward, MIDDLEGAMES), (backward, MIDDLEGAMES[::-1])):
        with pool(depth=8) as engines:
            answers.update(zip(order, engines.analyse(order), strict=True))
    assert forward == backward
    with pool(depth=8, num_engines=2) as engines, ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(engines.analyse, [fen]) for fen in MIDDLEGAMES * 2]
        answers = [future.result()[0] for future in futures]
    assert answers == [forward[fen] for fen in MIDDLEGAMES * 2]


@pytest.fixture
def asked(monkeypatch):
    """Positions that engines are asked about."""
    asked, ask = [], EnginePool._analyse

    def count(self, engine, board, moves):
        asked.append((board.fen(), *moves))
        return ask(self, engine, board, moves)

    monkeypatch.setattr(EnginePool, "_analyse", count)
    return asked


def test_the_same_question_twice_is_one_analysis(asked):
    with pool() as engines:
        futures = [engines.submit(ROOK_ENDING) for _ in range(8)]
        assert not futures[0].cancel()  # one caller losing interest harms no other
        assert len({future.result() for future in futures}) == 1
    assert asked == [(ROOK_ENDING,)]


def test_the_cache_outlives_the_pool_and_is_kept_apart_by_limit(tmp_path, asked):
    path, fen = tmp_path / "new folder" / "engine.sqlite", MIDDLEGAMES[0]
    answers = []
    for _ in range(2):
        with pool(cache_path=path) as engines:
            answers += engines.analyse([fen])
    assert answers[0] == answers[1] and len(asked) == 1
    with pool(cache_path=path) as engines, pool(cache_path=path, depth=5) as shallower:
        engines.submit(fen, ["g8f6"]).result()
        shallower.analyse([fen])
    assert asked == [(fen,), (fen, "g8f6"), (fen,)]


@needs_engine
def test_two_processes_share_one_cache_file(tmp_path):
    script = (
        "import sys; from rewards.engine import EnginePool\n"
        "with EnginePool(depth=4, cache_path=sys.argv[1]) as p: print(p.analyse(sys.argv[2:]))"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "engine.sqlite"), *MIDDLEGAMES]
    started = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    (one, complaints), (two, more_complaints) = [process.communicate() for process in started]
    assert one == two != b"" and complaints == more_complaints == b""


def test_a_damaged_cache_costs_a_warning_and_nothing_else(tmp_path, logged):
    (tmp_path / "engine.sqlite").write_bytes(b"this is no database " * 100)
    with pool(cache_path=tmp_path / "engine.sqlite") as engines:
        assert engines.analyse([ROOK_ENDING, ROOK_ENDING])
    assert ["cannot be used" in line for line in logged] == [True]


def test_an_engine_that_dies_or_hangs_is_restarted_and_asked_once_more(engines: EnginePool, monkeypatch):
    """With the same answer; a second time on one position fails that, and the next is served."""
    (undisturbed,) = engines.analyse([ROOK_ENDING])
    ask, harmed = EnginePool._analyse, []
    harm = {ROOK_ENDING: ["kill"], MIDDLEGAMES[0]: ["kill", "kill"], MIDDLEGAMES[1]: ["hang"]}

    def ask_and_harm(self, engine, board, moves):
        if harm.get(fen := board.fen()):
            harmed.append(engine.transport.get_pid())
            os.kill(harmed[-1], signal.SIGSTOP)  # so that it cannot be done before it is killed
            if harm[fen].pop() == "kill":
                threading.Timer(0.1, os.kill, (harmed[-1], signal.SIGKILL)).start()
        return ask(self, engine, board, moves)

    monkeypatch.setattr(EnginePool, "_analyse", ask_and_harm)
    monkeypatch.setattr(rewards.engine, "PATIENCE_S", 2.0)
    with pool() as own:
        assert own.submit(ROOK_ENDING).result(timeout=60) == undisturbed
        with pytest.raises(EngineError, match="failed on 'r1bqkbnr"):
            own.submit(MIDDLEGAMES[0]).result(timeout=60)
        assert own.submit(MATE_IN_ONE, ["a1a8"]).result(timeout=60).evals == (999.99,)
        assert own.submit(MIDDLEGAMES[1]).result(timeout=60).moves
        assert len(harmed) == len(set(harmed)) == 4 and not set(harmed) & {*pids(own), *children()}


def test_an_engine_that_cannot_be_restarted_fails_its_position_and_is_tried_later(tmp_path, monkeypatch):
    monkeypatch.setattr(rewards.engine, "START_TIMEOUT_S", 1.0)
    before, executable = children(), tmp_path / "stockfish"

    def become(program: str | None) -> None:
        executable.unlink(missing_ok=True)
        executable.symlink_to(str(program))

    become(find_stockfish())
    with pool(path=str(executable)) as engines:
        become("/bin/cat")
        os.kill(pids(engines)[0], signal.SIGKILL)
        with pytest.raises(EngineError, match="not a working UCI engine"):
            engines.submit(ROOK_ENDING).result(timeout=60)
        assert no_more_than(before)
        become(find_stockfish())
        monkeypatch.undo()
        assert engines.submit(ROOK_ENDING).result(timeout=60).moves


def test_close_while_analyses_run_fails_them_and_leaves_no_process():
    engines = pool(depth=40, num_engines=2)
    before = pids(engines)
    os.kill(before[0], signal.SIGSTOP)
    futures = [engines.submit(fen) for fen in MIDDLEGAMES]
    time.sleep(0.2)
    for _ in range(2):
        engines.close()
    for ask in (
        *(lambda future=future: future.result(timeout=0) for future in futures),
        lambda: engines.submit(ROOK_ENDING),
    ):
        with pytest.raises(EngineError, match="closed"):
            ask()
    assert not set(before) & children()


@needs_engine
def test_a_program_that_forgets_to_close_still_ends_and_so_does_its_engine():
    script = (
        "from rewards.engine import EnginePool; import chess\n"
        "p = EnginePool(depth=40, cache_path=':memory:'); p.submit(chess.STARTING_FEN)\n"
        "print(*[engine.transport.get_pid() for engine in p._engines.engines])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stderr == ""
    deadline = time.monotonic() + 60
    while not gone_or_zombie(int(ran.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@needs_engine
def test_ctrl_c_while_engines_start_ends_the_program():
    """Not only where it waits for them: each has a thread that Python would wait for."""
    script = (
        "import os, signal, threading; from rewards.engine import EnginePool\n"
        # Of tests that run in the background Ctrl-C is ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()\n"
        "with EnginePool(depth=40, num_engines=3, cache_path=':memory:') as pool:\n"
        "    pool.analyse(['8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56'])"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ran.returncode == -signal.SIGINT and "KeyboardInterrupt" in ran.stderr
