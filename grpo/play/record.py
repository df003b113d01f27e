"""A match as PGN, the only record of it: from there one that was stopped goes on, and reports are made."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import chess
import chess.pgn

from grpo.errors import UserError
from grpo.files import write_whole
from grpo.play.thought import MoveChoice, MoveSource
from grpo.statistics import bounded_interval

FILE = "games.pgn"
FOLDER = "matches"
"""In a run's folder."""
_SITE = "grpo-lean"
_MAY_DIFFER = {"Event", "Date", "Result", "Termination"}
"""Headers in which a match that goes on is not what it was; the players stand in others."""
_RESULTS = ("*", "1-0", "0-1", "1/2-1/2")
_RESIGNED = "an illegal answer"
_REMARKS: dict[MoveSource, str] = {
    "candidate": "an illegal answer: its next candidate",
    "again": "an illegal answer: asked again",
    "random": "illegal answers: at random",
}


class Game:
    """One game, which is its PGN: a comment says what replaced an illegal answer, a header how it ended.

    fen: of the first position. board: as it stands, with all moves. ending: checkmate, stalemate and so on;
    "" of a game that goes on.
    """

    def __init__(self, pgn: chess.pgn.Game, *, first_is_white: bool = True) -> None:
        self.pgn, self.first_is_white, self.board = pgn, first_is_white, pgn.end().board()
        self.fen, self._text = pgn.board().fen(), ""
        self.result, self.ending = pgn.headers["Result"], pgn.headers.get("Termination", "")
        self._end_by_the_rules()

    @staticmethod
    def begin(
        board: chess.Board, headers: Mapping[str, object] | None = None, *, first_is_white: bool = True
    ) -> "Game":
        """Begins a game at a position, where it may be over already. Headers that are None are left out."""
        texts = {name: _text(value) for name, value in (headers or {}).items() if value is not None}
        pgn = chess.pgn.Game({**texts, "Result": "*"})
        pgn.setup(board)
        return Game(pgn, first_is_white=first_is_white)

    @property
    def moves(self) -> list[str]:
        """The moves of the game, in UCI."""
        return [move.uci() for move in self.board.move_stack]

    @property
    def is_over(self) -> bool:
        return self.result != "*"

    @property
    def turn(self) -> int:
        """Who is to move: 0 the first player, 1 the second."""
        return int(self.board.turn != self.first_is_white)

    @property
    def points(self) -> float:
        """The first player's points."""
        if self.result == "1/2-1/2":
            return 0.5
        return float((self.result == "1-0") == self.first_is_white)

    def play(self, thought: MoveChoice) -> None:
        """Plays a move; the rules end the game, or a player who makes none."""
        if thought.move is None:
            self._end("0-1" if self.board.turn else "1-0", _RESIGNED if thought.illegal else "no move")
        else:
            self.pgn.end().add_variation(thought.move, comment=_REMARKS.get(thought.how, ""))
            self.board.push(thought.move)
            self._end_by_the_rules()

    def _end_by_the_rules(self) -> None:
        if outcome := self.board.outcome():
            self._end(outcome.result(), outcome.termination.name.lower().replace("_", " "))
        elif self.board.is_repetition(3):
            self._end("1/2-1/2", "threefold repetition")
        elif self.board.is_fifty_moves():
            self._end("1/2-1/2", "fifty moves")

    def _end(self, result: str, ending: str) -> None:
        self.result, self.ending = result, ending
        self.pgn.headers.update({"Result": result, "Termination": ending})

    def illegal(self, player: int) -> list[int]:
        """Half-moves of this game, from 1, at which a player's answer was illegal."""
        nodes = enumerate(self.pgn.mainline(), start=1)  # with who moves after them
        answers = [(ply, node.turn()) for ply, node in nodes if node.comment in _REMARKS.values()]
        if self.ending == _RESIGNED:
            answers.append((len(self.moves) + 1, not self.board.turn))
        return [ply for ply, turn in answers if (turn == self.first_is_white) == bool(player)]

    @property
    def text(self) -> str:
        """The game as PGN, which takes 10 ms to make: it is kept, once the game is over."""
        text = self._text or str(self.pgn)
        if self.is_over:
            self._text = text
        return text


class Score(NamedTuple):
    """The score of games, as the first player sees them."""

    wins: int
    draws: int
    losses: int
    pairs: tuple[float, ...] = ()
    """Points a game, of each two games that began alike; () where games are independent of each other."""

    @property
    def games(self) -> int:
        return self.wins + self.draws + self.losses

    @property
    def share(self) -> float:
        """The points a game: a win is 1, a draw a half."""
        return (self.wins + self.draws / 2) / self.games

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval of the expected points a game."""
        each = self.pairs or [1.0] * self.wins + [0.5] * self.draws + [0.0] * self.losses
        return bounded_interval(each)

    def share_in_words(self) -> str:
        """The share of points in words: 64.2 % (57.4 to 70.5)."""
        low, high = self.interval
        return f"{100 * self.share:.1f} % ({100 * low:.1f} to {100 * high:.1f})"

    def elo_in_words(self) -> str:
        """The first player's lead: +12 (-35 to +60), infinite where all games were won or lost."""
        elo, low, high = map(elo_difference, (self.share, *self.interval))
        return f"{elo:+.0f} ({low:+.0f} to {high:+.0f})"


def elo_difference(share: float) -> float:
    """Points of Elo at which so much is expected: 400 log10(s / (1 - s)) (Elo, 1978)."""
    if share in (0.0, 1.0):
        return math.copysign(math.inf, share - 0.5)
    return 400 * math.log10(share / (1 - share)) + 0.0


@dataclass
class Match:
    """Games between two players, who have names; the first is White in every other game."""

    games: list[Game]

    @staticmethod
    def begin(
        players: tuple[str, str], settings: Mapping[str, object], starts: Sequence[chess.Board], count: int
    ) -> "Match":
        """Begins games, of which each two have one first position, with colours exchanged.

        settings: by which it is played; another match has others. They become headers, whose names are in
        lower letters, unlike those that are PGN's own.
        """
        games = []
        for number in range(count):
            first_is_white = number % 2 == 0
            white, black = players if first_is_white else reversed(players)
            headers = {
                "Event": f"{players[0]} against {players[1]}",
                "Site": _SITE,
                "Round": number + 1,
                "Date": date.today().strftime("%Y.%m.%d"),
                "White": white,
                "Black": black,
                **settings,
            }
            games.append(Game.begin(starts[number // 2], headers, first_is_white=first_is_white))
        return Match(games)

    @property
    def players(self) -> tuple[str, str]:
        headers = self.games[0].pgn.headers
        return headers["White"], headers["Black"]

    @property
    def settings(self) -> dict[str, str]:
        return {name: text for name, text in self.games[0].pgn.headers.items() if name.islower()}

    @property
    def finished(self) -> list[Game]:
        return [game for game in self.games if game.is_over]

    @property
    def score(self) -> Score:
        """The score of finished games. Each two have one first position, with colours exchanged."""
        points = [game.points for game in self.finished]
        by_start: dict[int, list[float]] = {}
        for number, game in enumerate(self.games):
            if game.is_over:
                by_start.setdefault(number // 2, []).append(game.points)
        pairs = tuple(fmean(each) for each in by_start.values())
        return Score(points.count(1.0), points.count(0.5), points.count(0.0), pairs)

    def illegal_a_game(self, player: int) -> float:
        """The mean number of a player's illegal answers in a finished game."""
        games = self.finished
        return sum(len(game.illegal(player)) for game in games) / len(games)

    def first_illegal(self, player: int) -> float | None:
        """The half-move of the first one: the median over games that have one."""
        firsts = [min(plies) for game in self.finished if (plies := game.illegal(player))]
        return median(firsts) if firsts else None

    def save(self, folder: Path) -> None:
        """Saves all games, also those that have not begun. OSError where they cannot be written."""
        write_whole(folder / FILE, "\n\n".join([*(game.text for game in self.games), ""]))

    @staticmethod
    def load(folder: Path) -> "Match":
        """Reads a match that `save` wrote. ValueError for anything else."""
        file, games = folder / FILE, list[Game]()
        try:
            with file.open(encoding="utf-8") as lines:
                while pgn := chess.pgn.read_game(lines):
                    if pgn.errors:
                        raise UserError(pgn.errors[0])
                    if pgn.headers["Site"] != _SITE or pgn.headers["Result"] not in _RESULTS:
                        raise UserError("it was not made here")
                    games.append(Game(pgn, first_is_white=len(games) % 2 == 0))
            if not games:
                raise UserError("it is empty")
        except (OSError, ValueError, LookupError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise UserError(
                f"{file} is no match ({reason}): remove it, or play into another folder"
            ) from error
        return Match(games)

    def resume_from(self, folder: Path) -> "Match":
        """Returns this match with what was played of it before. ValueError where the folder has another."""
        if not (folder / FILE).is_file():
            return self
        before = Match.load(folder).games
        if len(self.games) < (begun := len(before)):
            raise UserError(
                f"{folder} is a match of {begun} games: give --games {begun} or more, or another --output"
            )
        for old, new in zip(before, self.games, strict=False):
            was, wanted = old.pgn.headers, new.pgn.headers
            for name in {**was, **wanted}:
                if name not in _MAY_DIFFER and was.get(name) != wanted.get(name):
                    difference = f"{name} {was.get(name)}, not {wanted.get(name)}"
                    raise UserError(
                        f"{folder} is a match with {difference}: give another --output, or remove it"
                    )
        return Match([*before, *self.games[begun:]])


def _text(value: object) -> str:
    """A text as it may stand in a PGN header."""
    return " ".join(str(value).replace('"', "'").split())
