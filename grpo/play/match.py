"""Two players, many games at once: who is to move is asked for all of them together."""

import time
from collections.abc import Callable, Sequence

import chess
import numpy as np

from grpo.evaluate.evaluation import Evaluation
from grpo.play.opponents import Opponent
from grpo.play.record import Game, Match
from grpo.play.thought import Position, game_seed
from grpo.types import Prompt

GAMES = "games/score"
_SAVE_EVERY_S = 10.0


def pair_up(starts: Sequence[chess.Board], count: int) -> list[Game]:
    """Games of which each two have one first position, with colours exchanged."""
    return [Game(starts[number // 2].fen(), first_is_white=number % 2 == 0) for number in range(count)]


def play_match(
    match: Match,
    players: Sequence[Opponent],
    *,
    seed: int,
    at_once: int,
    replace: bool = True,
    save: Callable[[], None] = lambda: None,
    watch: Callable[[float], None] = lambda share: None,
    stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Play what is not over yet, from where it stands, until all is or somebody has `stopped` it.

    What is at random in a game goes by its number alone. at_once: games. replace: illegal answers, instead
    of losing by them. save: called every now and then, and at the end, whatever ends it. watch: told how far
    it is, from 0 to 1.
    """
    seeds = [game_seed(seed, number) for number in range(len(match.games))]
    saved = time.monotonic()
    try:
        while not stopped():
            going_on = [(game, own) for game, own in zip(match.games, seeds, strict=True) if not game.is_over]
            if not going_on:
                return
            for number, player in enumerate(players):
                turns = [(game, own) for game, own in going_on[:at_once]
                         if not game.is_over and game.turn == number]  # fmt: skip
                if turns:
                    thoughts = player.think(
                        [Position(game.board, own) for game, own in turns], replace=replace
                    )
                    for (game, _), thought in zip(turns, thoughts, strict=True):
                        game.play(thought)
            watch(sum(map(_share_played, match.games)) / len(match.games))
            if time.monotonic() - saved > _SAVE_EVERY_S:
                save()
                saved = time.monotonic()
    finally:
        save()


def _share_played(game: Game) -> float:
    """Nobody knows how long a game will be: half of it is gone after forty half-moves."""
    return 1.0 if game.is_over else len(game.moves) / (40 + len(game.moves))


def score_against(
    player: Opponent, other: Opponent, fens: Sequence[str], *, seed: int, at_once: int
) -> Evaluation:
    """Column `GAMES`: what a player scores from each position, the mean over both colours.

    Illegal answers lose: between weak models whose answers are replaced nearly all games are drawn.
    """
    boards = [chess.Board(fen) for fen in fens]
    match = Match(("", ""), {}, pair_up(boards, 2 * len(boards)))
    play_match(match, (player, other), seed=seed, at_once=at_once, replace=False)
    points = np.array([game.points for game in match.games]).reshape(-1, 2)
    return Evaluation.of([Prompt(fen, fen, {}) for fen in fens], {GAMES: points})
