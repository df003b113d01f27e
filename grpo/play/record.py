"""Games of a match, and their PGN: the only record of a match, from which one that was stopped goes on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import chess
import chess.pgn

from grpo.data.files import file_rows
from grpo.files import write_whole
from grpo.play.score import Score
from grpo.play.thought import How, Thought

FILE = "games.pgn"
FOLDER = "matches"
"""In a run's folder."""
_SITE = "grpo-lean"
_UNDECIDED = "*"
_RESIGNED = "an illegal answer"
_REMARKS: dict[How, str] = {
    "candidate": "an illegal answer: its next candidate", "again": "an illegal answer: asked again",
    "random": "illegal answers: at random",
}  # fmt: skip
_ELSEWHERE = "give another --output, or remove it"
_HOW = {remark: how for how, remark in _REMARKS.items()}


def _text(value: object) -> str:
    """As it may stand in a PGN header."""
    return " ".join(str(value).replace('"', "'").split())


def _value(text: str) -> Any:
    """A number, where it is one."""
    try:
        return json.loads(text)
    except ValueError:
        return text


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
            self.ending = _RESIGNED if thought.how == "resigned" else "no move"
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

    def to_pgn(self, players: Sequence[str], settings: dict[str, Any], number: int) -> chess.pgn.Game:
        """settings: headers whose names are in lower letters, unlike those that are PGN's own."""
        white, black = players if self.first_is_white else reversed(players)
        headers = {
            "Event": f"{players[0]} against {players[1]}", "Site": _SITE, "Round": number,
            "Date": date.today().strftime("%Y.%m.%d"), "White": white, "Black": black, "Result": self.result,
            "Termination": self.ending or None, **settings,
        }  # fmt: skip
        game = chess.pgn.Game({name: _text(each) for name, each in headers.items() if each is not None})
        game.setup(chess.Board(self.fen))
        node: chess.pgn.GameNode = game
        for ply, move in enumerate(self.moves):
            remark = _REMARKS[self.replaced[ply]] if ply in self.replaced else ""
            node = node.add_variation(chess.Move.from_uci(move), comment=remark)
        return game

    @staticmethod
    def from_pgn(game: chess.pgn.Game, *, first_is_white: bool) -> "Game":
        """What `to_pgn` made. ValueError for any other."""
        if game.errors or game.headers["Site"] != _SITE:
            raise ValueError(game.errors[0] if game.errors else f"Site is {game.headers['Site']!r}")
        moves = list(game.mainline())
        replaced = {ply: _HOW[move.comment] for ply, move in enumerate(moves) if move.comment in _HOW}
        ending = game.headers.get("Termination", "")
        if ending == _RESIGNED:
            replaced[len(moves)] = "resigned"
        return Game(
            game.board().fen(), first_is_white, [each.move.uci() for each in moves], replaced,
            game.headers["Result"], ending,
        )  # fmt: skip


@dataclass
class Match:
    """Games between two players, who have names; the first is White in every other game."""

    players: tuple[str, str]
    settings: dict[str, Any]
    """By which it is played; another match has others."""
    games: list[Game]
    _written: dict[int, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Games that are over, by number, as PGN, which takes 10 ms a game."""

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

    def save(self, folder: Path) -> None:
        """All games, also those that have not begun. OSError where they cannot be written."""
        texts = [self._written.get(number) or self._write(number) for number in range(len(self.games))]
        write_whole(folder / FILE, "\n\n".join([*texts, ""]))

    def _write(self, number: int) -> str:
        text = str(self.games[number].to_pgn(self.players, self.settings, number + 1))
        if self.games[number].is_over:
            self._written[number] = text
        return text

    @staticmethod
    def load(folder: Path) -> "Match":
        """What `save` wrote. ValueError for anything else."""
        file = folder / FILE
        try:
            games = [game for _, game, _ in file_rows(file)]
            headers = games[0].headers
            match = Match(
                (headers["White"], headers["Black"]),
                {name: _value(text) for name, text in headers.items() if name.islower()},
                [Game.from_pgn(game, first_is_white=place % 2 == 0) for place, game in enumerate(games)],
            )
        except (OSError, ValueError, LookupError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{file} is no match ({reason}): remove it, or play into another folder"
            ) from error
        match._written = {place: str(game) for place, game in enumerate(games) if match.games[place].is_over}
        return match

    def gone_on_with(self, folder: Path) -> "Match":
        """This one, or what was played of it before, with as many games. ValueError where that is another."""
        if not (folder / FILE).is_file():
            return self
        before = Match.load(folder)
        for name, was, wanted in (
            *(("players", *each) for each in zip(before.players, self.players, strict=True)),
            *((name, before.settings.get(name), wanted) for name, wanted in self.settings.items()),
        ):
            if _text(was) != _text(wanted):
                raise ValueError(f"{folder} is a match with {name} {was}, not {wanted}: {_ELSEWHERE}")
        begun = len(before.games)
        if len(self.games) < begun:
            raise ValueError(
                f"{folder} is a match of {begun} games: give --games {begun} or more, or another --output"
            )
        if [game.fen for game in before.games] != [game.fen for game in self.games[:begun]]:
            raise ValueError(f"{folder} is a match from other positions: {_ELSEWHERE}")
        before.games += self.games[begun:]
        return before
