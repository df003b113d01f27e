"""Games of a model against Stockfish, another engine, another model or chance: how much stronger is it?

grpo-lean match runs/NAME --against rook-tiny --games 100
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from loguru import logger
from rich.console import Console

from grpo.commands import DONE, INTERRUPTED
from grpo.config import CONFIG_FILE
from grpo.config.groups import Precision
from grpo.config.limits import COUNT, NOT_NEGATIVE, Settings, at_least
from grpo.errors import UserError
from grpo.play.thought import IllegalMoves

PLAYED_BY = ("start", "prompts", "temperature", "illegal_moves", "movetime", "nodes", "seed")
"""Settings by which games are played, whatever comes of them."""


@dataclass(frozen=True)
class MatchConfig(Settings):
    """Play a match, or go on with one that was stopped: the same command again. It is kept as PGN."""

    model: Annotated[str, tyro.conf.Positional]
    """auto, rook-tiny, a hub id, a model's folder, or a run's, which plays by its model/."""
    against: str
    """random, stockfish, stockfish:ELO, an engine by its path or as uci:COMMAND, or another model."""
    games: Annotated[int, COUNT] = 100
    """Each first position is played twice, with colours exchanged."""
    start: Annotated[Literal["openings", "prompts"], tyro.conf.arg(name="from")] = "openings"
    """Start after four half-moves at random, or at the run's held-out positions (for a model of endgames)."""
    prompts: str | None = None
    """Positions for --from prompts, if not the run's: bundled, a file, or a dataset on the hub."""
    temperature: Annotated[float, NOT_NEGATIVE] = 0.0
    """Temperature of the models' sampling; 0 is greedy."""
    illegal_moves: IllegalMoves = "replace"
    """Replace a model's illegal answer (by its next candidate, by what it says asked again, at last by a move
    at random), or let it lose the game."""
    movetime: Annotated[float, at_least(0.001)] = 0.1
    """Seconds of an engine for a move."""
    nodes: Annotated[int | None, COUNT] = None
    """Instead of seconds so many nodes: the same moves on any machine, of an engine that is not at random."""
    engines: Annotated[int, COUNT] = 1
    """Processes of an engine, each with a game at a time."""
    rows: Annotated[int, COUNT] = 64
    """Games at once."""
    seed: int = 0
    """Seed of first positions, of sampling and of moves at random."""
    device: str = "auto"
    """auto is the accelerator, if there is one."""
    precision: Precision | None = None
    """Dtype of matrix products; auto is bf16 where the device has it; None: a run's, or auto."""
    output: Path | None = None
    """The folder of the match; None: one in matches/ of the run, or of the present folder."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.prompts is not None and self.start != "prompts":
            yield "--prompts names positions to start from: add --from prompts, or leave it out"

    def folder(self, players: tuple[str, str]) -> Path:
        """The folder of the match between these players."""
        from grpo.play.record import FOLDER  # loads torch

        base = Path(self.model) if (Path(self.model) / CONFIG_FILE).is_file() else Path()
        name = f"{'-against-'.join(players)}{'-from-prompts' if self.start == 'prompts' else ''}"
        name = "".join(letter if letter.isalnum() or letter in "-._" else "-" for letter in name)
        return self.output or base / FOLDER / name


def main(config: MatchConfig, console: Console) -> int:
    """Play, and say what came of it."""
    logger.info("loading torch and {}", config.model)
    # Imported here: a wrong flag need not wait for the large libraries.
    import chess.engine

    from grpo.play.match import heldout_positions, play_match, random_openings, score_table
    from grpo.play.opponents import make_opponent
    from grpo.play.player import Player, display_name, make_player
    from grpo.play.record import FILE, Match
    from grpo.run.trained import TrainedModel

    players, count = (display_name(config.model), display_name(config.against)), -(-config.games // 2)
    model = TrainedModel.of(config.model, config.device, prompts=config.prompts, precision=config.precision)
    starts = (
        random_openings(count, seed=config.seed)
        if config.start == "openings"
        else heldout_positions(count, model=model, seed=config.seed)
    )
    folder = config.folder(players)
    settings = {name: getattr(config, name) for name in PLAYED_BY}
    match = Match.begin(players, settings, starts, config.games).resume_from(folder)

    def play_by(model: TrainedModel) -> Player:
        return make_player(model, temperature=config.temperature, rows=config.rows)

    def load_opponent(name: str) -> Player:
        return play_by(TrainedModel.of(name, config.device, precision=config.precision))

    limit = chess.engine.Limit(time=None if config.nodes else config.movetime, nodes=config.nodes)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with make_opponent(config.against, limit, config.engines, load_opponent) as opponent:
            play_match(
                match,
                (play_by(model), opponent),
                folder,
                seed=config.seed,
                at_once=config.rows,
                replace=config.illegal_moves == "replace",
            )
    except OSError as error:
        raise UserError(
            f"the match cannot be written to {folder} ({error}): make room, or give another --output"
        ) from error
    if match.finished:
        console.print(score_table(match))
    left = len(match.games) - len(match.finished)
    console.print(f"{folder / FILE}: {len(match.finished)} games", highlight=False, soft_wrap=True)
    if left:
        console.print(f"stopped with {left} games to play: the same command goes on with them")
    return INTERRUPTED if left else DONE
