"""`grpo-lean uci` with a real client, python-chess: whole games by the clock, starts, stops, and nonsense."""

import random
import sys
import time

import chess.engine
import tyro
from benchmarks.uci import command, median_ms, nonsense, play_games, stop_times, survives


def main(
    model: str = "rook-tiny", games: int = 20, lines: int = 1000, clock_s: float = 20.0, added_s: float = 0.1,
    seed: int = 0,
) -> int:  # fmt: skip
    """Print what happened; 1 if anything is not as it should be.

    Args:
        model: Who plays.
        games: Whole games against random moves, half of them from endgames.
        lines: Malformed ones, and ones out of order.
        clock_s: Seconds for a game.
        added_s: Seconds that each move adds.
        seed: Of positions, moves and lines.
    """
    begun = time.monotonic()
    with chess.engine.SimpleEngine.popen_uci(command(model), timeout=60, stderr=-3) as engine:
        introduced = time.monotonic() - begun
        engine.ping()
        print(f"uciok after {introduced:.1f} s, readyok after {time.monotonic() - begun:.1f} s")
        print(f"stop to bestmove: {median_ms(stop_times(engine, 20))}")
        played = play_games(engine, games, seed=seed, clock_s=clock_s, added_s=added_s)
    print(f"{played.games} games, {played.moves} of its moves, the slowest took {played.slowest_s:.2f} s")
    print(f"late: {played.late}, protocol errors: {len(played.errors)} {played.errors[:3]}")
    print(*played.results)
    rng = random.Random(seed)
    wrong = survives(model, [nonsense(rng) for _ in range(lines)])
    print(f"{lines} bad lines: {wrong or 'it obeys after them'}")
    return int(bool(wrong or played.errors or played.late))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
