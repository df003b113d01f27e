"""Two players, many games at once: who is to move is asked for all of them together."""

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import chess
from loguru import logger
from rich.table import Table

from grpo.errors import UserError
from grpo.logs.tables import table
from grpo.logs.waiting import progress_bar
from grpo.play.opponents import Opponent
from grpo.play.record import Game, Match
from grpo.play.thought import GamePosition, game_seed
from grpo.run.interrupt import stop_on_signal
from grpo.run.trained import TrainedModel

MOST_HELDOUT = 1000
"""Prompts of each task, among which first positions are drawn."""
_SAVE_EVERY_S = 20.0


def random_openings(count: int, *, seed: int) -> list[chess.Board]:
    """Positions after four random legal half-moves, whose game is not over."""
    rng = random.Random(f"openings {seed}")
    boards: list[chess.Board] = []
    while len(boards) < count:
        board = chess.Board()
        for _ in range(4):
            board.push(rng.choice(list(board.legal_moves)))
        if not board.is_game_over():
            boards.append(board)
    return boards


def heldout_positions(count: int, *, model: TrainedModel, seed: int) -> list[chess.Board]:
    """Some of a model's held-out prompts, whose game is not over. ValueError where there are too few."""
    heldout = model.prompts(seed=seed, heldout_count=MOST_HELDOUT).heldout
    fens = dict.fromkeys(prompt.columns["fen"] for prompt in heldout if prompt.task == "policy")
    boards = [board for board in map(chess.Board, fens) if not board.is_game_over()]
    if len(boards) < count:
        raise UserError(
            f"the games need {count} positions, and {model.settings.prompts} has {len(boards)} held out: "
            f"give --games {2 * len(boards)}, or other --prompts"
        )
    # All are shuffled: more games then begin with the same ones.
    return random.Random(f"starts {seed}").sample(boards, len(boards))[:count]


def play_games(
    games: Sequence[Game], players: Sequence[Opponent], *, seed: int, at_once: int, replace: bool = True
) -> Iterator[float]:
    """Play what is not over yet, from where it stands; after each round yields what share is played, up to 1.

    What is at random in a game goes by its number alone. players: who may be twice the same. at_once: games.
    replace: illegal answers, instead of losing by them.
    """
    seeds = {game: game_seed(seed, number) for number, game in enumerate(games)}
    while going_on := [game for game in games if not game.is_over][:at_once]:
        for player in dict.fromkeys(players):
            turns = [game for game in going_on if not game.is_over and players[game.turn] is player]
            positions = [GamePosition(game.board, seeds[game]) for game in turns]
            thoughts = player.think(positions, replace=replace) if turns else []
            for game, thought in zip(turns, thoughts, strict=True):
                game.play(thought)
        yield sum(_share_played(game) for game in games) / len(games)


def _share_played(game: Game) -> float:
    """The share of a game that is played: a half after forty half-moves, as its length is not known."""
    plies = len(game.board.move_stack)
    return 1.0 if game.is_over else plies / (40 + plies)


def play_match(
    match: Match, players: Sequence[Opponent], folder: Path, *, seed: int, at_once: int, replace: bool
) -> None:
    """Play to the end, or to a Ctrl-C; what has been played is in the folder, whatever ends it.

    OSError where it cannot be written.
    """
    match.save(folder)
    with stop_on_signal() as stop, progress_bar(f"{len(match.games)} games") as watch:
        stop.begun, saved = True, time.monotonic()
        logger.info("playing; Ctrl-C keeps what has been played")
        try:
            for share in play_games(match.games, players, seed=seed, at_once=at_once, replace=replace):
                watch(share)
                if stop.requested:
                    break
                if time.monotonic() - saved > _SAVE_EVERY_S:
                    match.save(folder)
                    saved = time.monotonic()
        finally:
            match.save(folder)


def score_table(match: Match) -> Table:
    """Makes a table of the score."""
    score, (first, second) = match.score, match.players
    facts = {
        "won, drawn, lost": f"{score.wins}, {score.draws}, {score.losses}",
        "score": score.share_in_words(),
        "Elo difference": score.elo_in_words(),
    }
    for player, name in enumerate(match.players):
        if (ply := match.first_illegal(player)) is not None:
            facts[f"illegal answers a game, {name}"] = f"{match.illegal_a_game(player):.2f}"
            facts[f"the first at half-move (median), {name}"] = f"{ply:g}"
    return table(
        [{"what": what, "value": value} for what, value in facts.items()],
        f"{first} against {second}, {score.games} games",
        caption="95 % intervals",
        show_header=False,
    )
