"""Two players, many games at once: who is to move is asked for all of them together."""

import random
from collections.abc import Iterator, Sequence

import chess
import numpy as np
from rich.table import Table

from grpo.data import load_prompts
from grpo.evaluate.evaluation import Evaluation
from grpo.play.opponents import Opponent
from grpo.play.player import settings_of
from grpo.play.record import Game, Match
from grpo.play.thought import Position, game_seed
from grpo.types import Prompt

GAMES = "games/score"


def random_openings(count: int, *, seed: int, plies: int = 4) -> list[chess.Board]:
    """Positions after `plies` random legal half-moves, whose game is not over."""
    rng = random.Random(f"openings {seed}")
    boards: list[chess.Board] = []
    while len(boards) < count:
        board = chess.Board()
        while board.ply() < plies and not board.is_game_over():
            board.push(rng.choice(list(board.legal_moves)))
        if not board.is_game_over():
            boards.append(board)
    return boards


def heldout_positions(count: int, *, model: str, prompts: str | None, seed: int) -> list[chess.Board]:
    """Some of a run's, whose game is not over, or of other prompts. ValueError where there are too few."""
    task = settings_of(model)
    prompts = prompts or task.prompts
    share = task.heldout_share if prompts == task.prompts else 1.0
    heldout = load_prompts(
        prompts, seed=seed, heldout_share=share, settings=task.asking, to_train=False
    ).heldout
    fens = dict.fromkeys(prompt.columns["fen"] for prompt in heldout if prompt.task == "policy")
    boards = [board for board in map(chess.Board, fens) if not board.is_game_over()]
    if len(boards) < count:
        raise ValueError(
            f"the games need {count} positions, and {prompts} has {len(boards)} held out: give --games "
            f"{2 * len(boards)}, or other --prompts"
        )
    # All are shuffled: more games then begin with the same ones.
    return random.Random(f"starts {seed}").sample(boards, len(boards))[:count]


def pair_up(starts: Sequence[chess.Board], count: int) -> list[Game]:
    """Games of which each two have one first position, with colours exchanged."""
    return [Game(starts[number // 2].fen(), first_is_white=number % 2 == 0) for number in range(count)]


def play_match(
    match: Match, players: Sequence[Opponent], *, seed: int, at_once: int, replace: bool = True
) -> Iterator[float]:
    """Play what is not over yet, from where it stands; after each round yields what share is played, up to 1.

    What is at random in a game goes by its number alone. at_once: games. replace: illegal answers, instead
    of losing by them.
    """
    games = [(game, game_seed(seed, number)) for number, game in enumerate(match.games)]
    while going_on := [each for each in games if not each[0].is_over][:at_once]:
        for number, player in enumerate(players):
            turns = [(game, own) for game, own in going_on if not game.is_over and game.turn == number]
            if turns:
                positions = [Position(game.board, own) for game, own in turns]
                for (game, _), thought in zip(turns, player.think(positions, replace=replace), strict=True):
                    game.play(thought)
        yield sum(_share_played(game) for game in match.games) / len(match.games)


def _share_played(game: Game) -> float:
    """Nobody knows how long a game will be: half of it is gone after forty half-moves."""
    return 1.0 if game.is_over else len(game.moves) / (40 + len(game.moves))


def score_against(
    player: Opponent, other: Opponent, fens: Sequence[str], *, seed: int, at_once: int
) -> Evaluation:
    """Column `GAMES`: what a player scores from each position, the mean over both colours.

    Illegal answers lose: between weak models whose answers are replaced nearly all games are drawn.
    """
    match = Match(("", ""), {}, pair_up([chess.Board(fen) for fen in fens], 2 * len(fens)))
    for _ in play_match(match, (player, other), seed=seed, at_once=at_once, replace=False):
        pass
    points = np.array([game.points for game in match.games]).reshape(-1, 2)
    return Evaluation.of([Prompt(fen, fen, {}) for fen in fens], {GAMES: points})


def score_table(match: Match) -> Table:
    """What came of it."""
    score, (first, second) = match.score, match.players
    table = Table(title=f"{first} against {second}, {score.games} games", show_header=False)
    table.add_row("won, drawn, lost", f"{score.wins}, {score.draws}, {score.losses}")
    table.add_row("score", score.share_in_words())
    table.add_row("Elo difference", score.elo_in_words())
    for player, name in enumerate(match.players):
        if (ply := match.first_illegal(player)) is not None:
            table.add_row(f"illegal answers a game, {name}", f"{match.illegal_a_game(player):.2f}")
            table.add_row("the first at half-move (median)", f"{ply:g}")
    table.caption = "95 % intervals"
    return table
