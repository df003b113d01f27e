"""A match as PGN, the only record of it: from there one that was stopped goes on, and reports are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median

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
_RESULTS = (_UNDECIDED, "1-0", "0-1", "1/2-1/2")
_RESIGNED = "an illegal answer"
_REMARKS: dict[How, str] = {
    "candidate": "an illegal answer: its next candidate",
    "again": "an illegal answer: asked again",
    "random": "illegal answers: at random",
}
_ELSEWHERE = "give another --output, or remove it"


class Game:
    """One game, which is its PGN: a comment says what replaced an illegal answer, a header how it ended."""

    def __init__(self, pgn: chess.pgn.Game, *, first_is_white: bool = True) -> None:
        self.pgn, self.first_is_white = pgn, first_is_white
        self.board = pgn.end().board()
        """As it stands, with all moves."""
        self._text = ""

    @staticmethod
    def begin(
        fen: str, headers: Mapping[str, object] | None = None, *, first_is_white: bool = True
    ) -> "Game":
        """From this position, where it may be over already. Headers that are None are left out."""
        texts = {name: _text(value) for name, value in (headers or {}).items() if value is not None}
        pgn = chess.pgn.Game({**texts, "Result": _UNDECIDED})
        pgn.setup(chess.Board(fen))
        game = Game(pgn, first_is_white=first_is_white)
        game._end_by_the_rules()
        return game

    @property
    def fen(self) -> str:
        """Of the first position."""
        return self.pgn.board().fen()

    @property
    def moves(self) -> list[str]:
        """UCI."""
        return [move.uci() for move in self.board.move_stack]

    @property
    def result(self) -> str:
        return self.pgn.headers["Result"]

    @property
    def ending(self) -> str:
        """checkmate, stalemate and so on; "" of a game that goes on."""
        return self.pgn.headers.get("Termination", "")

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
        if thought.move is None:
            ending = _RESIGNED if thought.how == "resigned" else "no move"
            self._end("0-1" if self.board.turn else "1-0", ending)
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
        self.pgn.headers["Result"], self.pgn.headers["Termination"] = result, ending

    def illegal(self, player: int) -> list[int]:
        """Half-moves of this game, from 1, at which a player's answer was illegal."""
        nodes = enumerate(self.pgn.mainline(), start=1)
        plies = [ply for ply, node in nodes if node.comment in _REMARKS.values()]
        if self.ending == _RESIGNED:
            plies.append(len(self.moves) + 1)
        begins = 0 if self.pgn.board().turn == self.first_is_white else 1
        return [ply for ply in plies if (ply - 1 + begins) % 2 == player]

    @property
    def text(self) -> str:
        """Its PGN, which takes 10 ms: kept, once the game is over."""
        if not self.is_over:
            return str(self.pgn)
        self._text = self._text or str(self.pgn)
        return self._text


@dataclass
class Match:
    """Games between two players, who have names; the first is White in every other game."""

    games: list[Game]

    @staticmethod
    def begin(
        players: tuple[str, str], settings: Mapping[str, object], starts: Sequence[chess.Board], count: int
    ) -> "Match":
        """Games of which each two have one first position, with colours exchanged.

        settings: by which it is played; another match has others. They become headers, whose names are in
        lower letters, unlike those that are PGN's own.
        """
        games = []
        for number in range(count):
            first_is_white = number % 2 == 0
            white, black = players if first_is_white else reversed(players)
            headers = {
                "Event": f"{players[0]} against {players[1]}", "Site": _SITE, "Round": number + 1,
                "Date": date.today().strftime("%Y.%m.%d"), "White": white, "Black": black, **settings,
            }  # fmt: skip
            games.append(Game.begin(starts[number // 2].fen(), headers, first_is_white=first_is_white))
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
        write_whole(folder / FILE, "\n\n".join([*(game.text for game in self.games), ""]))

    @staticmethod
    def load(folder: Path) -> "Match":
        """What `save` wrote. ValueError for anything else."""
        file = folder / FILE
        try:
            games = [game for _, game, _ in file_rows(file)]
            for game in games:
                if game.errors:
                    raise ValueError(game.errors[0])
                if game.headers["Site"] != _SITE or game.headers["Result"] not in _RESULTS:
                    raise ValueError("it was not made here")
            match = Match([Game(game, first_is_white=place % 2 == 0) for place, game in enumerate(games)])
            _ = match.players
        except (OSError, ValueError, LookupError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"{file} is no match ({reason}): remove it, or play into another folder"
            ) from error
        return match

    def gone_on_with(self, folder: Path) -> "Match":
        """This one, or what was played of it before, with as many games. ValueError where that is another."""
        if not (folder / FILE).is_file():
            return self
        before = Match.load(folder)
        compared = [("players", *pair) for pair in zip(before.players, self.players, strict=True)]
        for name in before.settings | self.settings:
            compared.append((name, str(before.settings.get(name)), str(self.settings.get(name))))
        for name, was, wanted in compared:
            if was != wanted:
                raise ValueError(f"{folder} is a match with {name} {was}, not {wanted}: {_ELSEWHERE}")
        begun = len(before.games)
        if len(self.games) < begun:
            raise ValueError(
                f"{folder} is a match of {begun} games: give --games {begun} or more, or another --output"
            )
        if [game.fen for game in before.games] != [game.fen for game in self.games[:begun]]:
            raise ValueError(f"{folder} is a match from other positions: {_ELSEWHERE}")
        return Match([*before.games, *self.games[begun:]])


def _text(value: object) -> str:
    """As it may stand in a PGN header."""
    return " ".join(str(value).replace('"', "'").split())
