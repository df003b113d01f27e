"""Games of a model against Stockfish, another engine, another model or chance: how much stronger is it?

python scripts/match.py runs/NAME --against rook-tiny --games 100
"""

import random
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from loguru import logger

from grpo.commands.screen import print_error, screen
from grpo.config import CONFIG_FILE
from grpo.config.groups import Precision
from grpo.play.requests import IllegalMoves
from grpo.run.interrupt import stop_on_signal
from grpo.run.screen import configure_logging
from grpo.waiting import waiting
from rewards.engine import EngineError

if TYPE_CHECKING:
    import chess
    from rich.table import Table

    from grpo.play.record import Match

DONE, WRONG_SETTING, STOPPED = 0, 2, 130
"""Exit statuses."""


@dataclass(frozen=True)
class MatchConfig:
    """Play a match, or go on with one that was stopped: the same command again. PGN and JSON are kept."""

    model: Annotated[str, tyro.conf.Positional]
    """auto, rook-tiny, a hub id, a model's folder, or a run's: its best checkpoint, else its newest."""
    against: str
    """random, stockfish, stockfish:ELO, an engine by its path or as uci:COMMAND, or another model."""
    games: int = 100
    """Each first position is played twice, with colours exchanged."""
    start: Annotated[Literal["openings", "prompts"], tyro.conf.arg(name="from")] = "openings"
    """Start after four half-moves at random, or at the run's held-out positions (for a model of endgames)."""
    prompts: str | None = None
    """With --from prompts others than the run's: bundled, a file, or a dataset on the hub."""
    temperature: float = 0.0
    """Of models' sampling; 0 is greedy."""
    illegal_moves: IllegalMoves = "replace"
    """Replace a model's illegal answer (by its next candidate, by what it says asked again, at last by a move
    at random), or let it lose the game."""
    movetime: float = 0.1
    """Seconds of an engine for a move."""
    nodes: int | None = None
    """Instead of seconds so many nodes: the same moves on any machine, of an engine that is not at random."""
    engines: int = 1
    """Processes of an engine, each with a game at a time."""
    rows: int = 64
    """Games at once."""
    seed: int = 0
    """Of first positions, of sampling and of moves at random."""
    device: str = "auto"
    """auto is the accelerator, if there is one."""
    precision: Precision = "auto"
    """Of matrix products; auto is bf16 where the device has it."""
    output: Path | None = None
    """The folder of the match; None: one in matches/ of the run, or of the present folder."""

    def __post_init__(self) -> None:
        for name in ("games", "nodes", "engines", "rows"):
            if (number := getattr(self, name)) is not None and number < 1:
                raise ValueError(f"--{name} is {number}: give at least 1")
        for name, least in (("temperature", 0.0), ("movetime", 0.001)):
            if not least <= (value := getattr(self, name)) < float("inf"):
                raise ValueError(f"--{name} is {value}: give {least:g} or more")
        if self.prompts is not None and self.start != "prompts":
            raise ValueError("--prompts names positions to start from: add --from prompts, or leave it out")

    @property
    def settings(self) -> dict[str, Any]:
        """By which games are played, whatever comes of them."""
        names = ("start", "prompts", "temperature", "illegal_moves", "movetime", "nodes", "seed")
        return {name: getattr(self, name) for name in names}

    def folder(self, first: str, second: str) -> Path:
        """first, second: as the models are known that play."""
        if self.output is not None:
            return self.output
        from grpo.play.record import FOLDER

        base = Path(self.model) if (Path(self.model) / CONFIG_FILE).is_file() else Path()
        name = f"{first}-against-{second}{'-from-prompts' if self.start == 'prompts' else ''}"
        return base / FOLDER / "".join(each if each.isalnum() or each in "-._" else "-" for each in name)


def main() -> int:
    """Run the command line."""
    console = screen()
    try:
        config = tyro.cli(MatchConfig)
        configure_logging("INFO", console)
        match, folder = play(config)
    except (ValueError, EngineError) as error:
        print_error(screen(stderr=True), error)
        return WRONG_SETTING
    from grpo.play.record import PGN_FILE

    if match.finished:
        console.print(score_table(match))
    left = len(match.games) - len(match.finished)
    console.print(f"{folder / PGN_FILE}: {len(match.finished)} games", highlight=False)
    if left:
        console.print(
            f"stopped with {left} games to play: the same command goes on with them", highlight=False
        )
    return STOPPED if left else DONE


def play(config: MatchConfig) -> "tuple[Match, Path]":
    """The match, played as far as nobody stopped it, and its folder."""
    logger.info("loading torch and {}", config.model)
    # Imported here: a wrong flag need not wait for the large libraries.
    import chess.engine

    from grpo.play.load import known_as, load_player
    from grpo.play.match import pair_up, play_match
    from grpo.play.opponents import is_model, make_opponent
    from grpo.play.record import FILE, Match

    players = known_as(config.model), known_as(config.against) if is_model(config.against) else config.against
    folder = config.folder(*players)
    match = Match(players, config.settings, pair_up(_starts(config), config.games))
    if (folder / FILE).is_file():
        match = _gone_on_with(Match.load(folder), match, folder)

    def load(model: str) -> Any:
        return load_player(
            model, config.device, config.precision, temperature=config.temperature, rows=config.rows
        )

    limit = chess.engine.Limit(time=None if config.nodes else config.movetime, nodes=config.nodes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            opponent = stack.enter_context(make_opponent(config.against, limit, config.engines, load))
            first = load(config.model)
            match.save(folder)
            stop = stack.enter_context(stop_on_signal())
            watch = stack.enter_context(waiting(f"{config.games} games"))
            stack.callback(match.save_pgn, folder)
            stop.begun = True
            logger.info("playing; Ctrl-C keeps what has been played")
            play_match(
                match, (first, opponent), seed=config.seed, at_once=config.rows,
                replace=config.illegal_moves == "replace", save=lambda: match.save(folder), watch=watch,
                stopped=lambda: stop.requested,
            )  # fmt: skip
    except OSError as error:
        raise ValueError(
            f"the match cannot be written to {folder} ({error}): make room, or give another --output"
        ) from error
    return match, folder


def _gone_on_with(before: "Match", now: "Match", folder: Path) -> "Match":
    """A match that was begun, with as many games as are wanted now. ValueError where it is another one."""
    for name, was, wanted in (
        ("players", before.players, now.players),
        *((name, before.settings.get(name), wanted) for name, wanted in now.settings.items()),
    ):
        if was != wanted:
            raise ValueError(
                f"{folder} is a match with {name} {was}, not {wanted}: give another --output, or remove it"
            )
    begun = len(before.games)
    if len(now.games) < begun:
        raise ValueError(
            f"{folder} is a match of {begun} games: give --games {begun} or more, or another --output"
        )
    if [game.fen for game in before.games] != [game.fen for game in now.games[:begun]]:
        raise ValueError(f"{folder} is a match from other positions: give another --output, or remove it")
    before.games += now.games[begun:]
    return before


def _starts(config: MatchConfig) -> "list[chess.Board]":
    """A first position for each two games, none of which is over."""
    import chess

    from grpo.data import load_prompts
    from grpo.evaluate.games import random_openings
    from grpo.play.load import settings_of

    count = -(-config.games // 2)
    if config.start == "openings":
        return random_openings(count, seed=config.seed)
    task = settings_of(config.model)
    prompts = config.prompts or task.prompts
    share = task.heldout_share if prompts == task.prompts else 1.0
    heldout = load_prompts(
        prompts, seed=config.seed, heldout_share=share, settings=task.asking, to_train=False
    ).heldout
    fens = dict.fromkeys(prompt.columns["fen"] for prompt in heldout if prompt.task == "policy")
    boards = [board for board in map(chess.Board, fens) if not board.is_game_over()]
    if len(boards) < count:
        raise ValueError(
            f"{config.games} games need {count} positions, and {prompts} has {len(boards)} held "
            f"out: give --games {2 * len(boards)}, or other --prompts"
        )
    # All are shuffled: more games then begin with the same ones.
    return random.Random(f"starts {config.seed}").sample(boards, len(boards))[:count]


def score_table(match: "Match") -> "Table":
    """What came of it."""
    from rich.table import Table

    score, (first, second) = match.score, match.players
    table = Table(title=f"{first} against {second}, {score.games} games", show_header=False)
    table.add_row("won, drawn, lost", f"{score.wins}, {score.draws}, {score.losses}")
    table.add_row("score", score.share_in_words())
    table.add_row("Elo difference", score.elo_in_words())
    for player, name in enumerate(match.players):
        plies = match.first_illegal(player)
        if plies is not None:
            table.add_row(f"illegal answers a game, {name}", f"{match.illegal_a_game(player):.2f}")
            table.add_row("the first at half-move (median)", f"{plies:g}")
    table.caption = "95 % intervals"
    return table
