"""Games of a match as they are kept: JSON to go on from, and PGN to look at."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import chess
import chess.pgn

from grpo.files import write_whole
from grpo.play.score import Score
from grpo.play.thought import How, Thought

FILE, PGN_FILE = "match.json", "games.pgn"
FOLDER = "matches"
"""In a run's folder."""
_UNDECIDED = "*"
_REMARKS: dict[str, str] = {
    "candidate": "an illegal answer: its next candidate", "again": "an illegal answer: asked again",
    "random": "illegal answers: at random",
}  # fmt: skip


@dataclass
class Game:
    """One game, from its first position to its result."""

    fen: str
    first_is_white: bool
    moves: list[str] = field(default_factory=list)
    """UCI."""
    replaced: dict[int, How] = field(default_factory=dict)
    """By half-move of this game from 0, how those came about that were not a model's first answer."""
    result: str = _UNDECIDED
    ending: str = ""
    """checkmate, stalemate and so on."""

    def __post_init__(self) -> None:
        self.replaced = {int(ply): how for ply, how in self.replaced.items()}  # JSON's keys are texts

    @cached_property
    def board(self) -> chess.Board:
        """As it stands, with all moves."""
        board = chess.Board(self.fen)
        for move in self.moves:
            board.push_uci(move)
        return board

    @property
    def is_over(self) -> bool:
        return self.result != _UNDECIDED

    @property
    def turn(self) -> int:
        """Who is to move: 0 the first player, 1 the second."""
        return int(self.board.turn != self.first_is_white)

    @property
    def points(self) -> float:
        """Of the first player."""
        if self.result == "1/2-1/2":
            return 0.5
        return float((self.result == "1-0") == self.first_is_white)

    def play(self, thought: Thought) -> None:
        """A move, and what the rules say of it: nothing else ends a game, but for whoever makes none."""
        if thought.how != "best":
            self.replaced[len(self.moves)] = thought.how
        if thought.move is None:
            self.result = "0-1" if self.board.turn else "1-0"
            self.ending = "an illegal answer" if thought.how == "resigned" else "no move"
            return
        self.board.push(thought.move)
        self.moves.append(thought.move.uci())
        if outcome := self.board.outcome():
            self.result = outcome.result()
            self.ending = outcome.termination.name.lower().replace("_", " ")
        elif self.board.is_repetition(3) or self.board.is_fifty_moves():
            self.result = "1/2-1/2"
            self.ending = "threefold repetition" if self.board.is_repetition(3) else "fifty moves"

    def illegal(self, player: int) -> list[int]:
        """Half-moves of this game, from 1, at which a player's answer was illegal."""
        starts = 0 if chess.Board(self.fen).turn == self.first_is_white else 1
        return [ply + 1 for ply in self.replaced if (ply + starts) % 2 == player]

    def to_pgn(self, players: Sequence[str], number: int) -> chess.pgn.Game:
        game = chess.pgn.Game()
        white, black = players if self.first_is_white else reversed(players)
        game.headers.update(
            Event=f"{players[0]} against {players[1]}", Site="grpo-lean", Round=str(number), White=white,
            Black=black, Result=self.result, Date=date.today().strftime("%Y.%m.%d"),
        )  # fmt: skip
        if self.ending:
            game.headers["Termination"] = self.ending
        game.setup(chess.Board(self.fen))
        node: chess.pgn.GameNode = game
        for ply, move in enumerate(self.moves):
            node = node.add_variation(chess.Move.from_uci(move))
            node.comment = _REMARKS.get(self.replaced.get(ply, ""), "")
        return game


@dataclass
class Match:
    """Games between two players, who have names."""

    players: tuple[str, str]
    settings: dict[str, Any]
    """By which it is played; another match has others."""
    games: list[Game]

    @property
    def finished(self) -> list[Game]:
        return [game for game in self.games if game.is_over]

    @property
    def score(self) -> Score:
        points = [game.points for game in self.finished]
        return Score(points.count(1.0), points.count(0.5), points.count(0.0))

    def illegal_a_game(self, player: int) -> float:
        """Illegal answers, of finished games."""
        games = self.finished
        return sum(len(game.illegal(player)) for game in games) / len(games)

    def first_illegal(self, player: int) -> float | None:
        """The half-move of the first one: the median over games that have one."""
        firsts = [min(plies) for game in self.finished if (plies := game.illegal(player))]
        return median(firsts) if firsts else None

    def summary(self) -> dict[str, Any]:
        """The figures, for whoever reads the file."""
        if not self.finished:
            return {}
        score = self.score
        ends = zip(("low", "high"), score.elo_interval, strict=True)
        return {
            **score._asdict(), "share": score.share, "elo": _finite(score.elo),
            **{f"elo_{name}": _finite(end) for name, end in ends},
            "illegal_a_game": [self.illegal_a_game(player) for player in (0, 1)],
            "first_illegal": [self.first_illegal(player) for player in (0, 1)],
        }  # fmt: skip

    def save(self, folder: Path) -> None:
        """The games, to go on from. OSError where they cannot be written."""
        content = {
            "players": self.players, "settings": self.settings, "summary": self.summary(),
            "games": [asdict(game) for game in self.games],
        }  # fmt: skip
        write_whole(folder / FILE, json.dumps(content, indent=1))

    def save_pgn(self, folder: Path) -> None:
        """The same for other programs; it takes longer."""
        begun = [(number, game) for number, game in enumerate(self.games, 1) if game.moves]
        games = [str(game.to_pgn(self.players, number)) for number, game in begun]
        write_whole(folder / PGN_FILE, "\n\n".join([*games, ""]))

    @staticmethod
    def load(folder: Path) -> "Match":
        """ValueError for what is no match."""
        file = folder / FILE
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            first, second = content["players"]
            games = [Game(**game) for game in content["games"]]
            for game in games:
                _ = game.board
            return Match((str(first), str(second)), dict(content["settings"]), games)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{file} is no match ({reason}): remove it, or play into another folder"
            ) from error


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None
