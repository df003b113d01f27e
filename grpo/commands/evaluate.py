"""Held-out quality of a model, in the RookWorld README's columns with 95 % intervals."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import chess
import tyro
from loguru import logger

from grpo.commands.screen import print_error, screen
from grpo.config import Config
from grpo.config.groups import Precision, SamplingSettings
from grpo.run.tracking import configure_logging
from rewards.engine import EngineError, EnginePool

if TYPE_CHECKING:
    from grpo.evaluate import Evaluation


DONE, WRONG_SETTING = 0, 2
"""Exit statuses."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluate a model on held-out prompts: greedily, unless a temperature is given."""

    model: Annotated[str, tyro.conf.Positional]
    """auto, rook-tiny, a hub id, a model's folder, or a run's: its best checkpoint, else its newest."""
    prompts: str = "bundled"
    """bundled, a file, or a dataset on the hub: its held-out part is used."""
    heldout_share: float = Config.heldout_share
    """Share of positions that is held out; the bundled ones are split already."""
    max_bad_share: float = 0.01
    """More rows than this that cannot be read, or whose prompt is too long for the model, are an error."""
    limit: int = 1000
    """Most prompts of each task, and most positions of --mate-in-one."""
    self_play: int = 0
    """Games to play against itself, each until the first illegal move."""
    self_play_from: Literal["openings", "prompts"] = "openings"
    """Start them after four random half-moves, or at held-out positions (for a model of endgames)."""
    mate_in_one: Path | None = None
    """BIG-bench's checkmate_in_one task.json."""
    temperature: float = 0.0
    """Of sampling; 0 is greedy."""
    samples: int = 1
    """Completions a prompt where the temperature is above 0."""
    max_new_tokens: int = 144
    """Longest completion in tokens."""
    trailing_space: bool = False
    """End policy prompts in a space."""
    stockfish: bool = False
    """Rank moves with Stockfish instead of by the prompts' labels."""
    stockfish_path: str | None = None
    """The same, with this executable."""
    engine_depth: int = 8
    """Plies Stockfish searches."""
    rows: int = 128
    """Completions on the device at once."""
    seed: int = 0
    """Of sampling, and of where games start."""
    device: str = "auto"
    """auto is the accelerator, if there is one."""
    precision: Precision = "auto"
    """Of matrix products; auto is bf16 where the device has it."""
    json: Path | None = None
    """Save the scores here."""
    before: Path | None = None
    """Compare with scores that --json saved here."""

    def __post_init__(self) -> None:
        at_least = {"limit": 1, "self_play": 0, "samples": 1, "engine_depth": 1, "rows": 1}
        for name, least in at_least.items():
            if (number := getattr(self, name)) < least:
                raise ValueError(f"--{name.replace('_', '-')} is {number}: give at least {least}")
        for name in ("heldout_share", "max_bad_share"):
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ValueError(f"--{name.replace('_', '-')} is {share}: give a share between 0 and 1")
        _ = self.sampling  # which checks its own
        if self.json is not None and not self.json.parent.is_dir():
            raise ValueError(f"--json {self.json}: there is no folder {self.json.parent}, make it first")

    @property
    def sampling(self) -> SamplingSettings:
        return SamplingSettings(max_new_tokens=self.max_new_tokens, temperature=self.temperature)


def checkpoint_of(model: str) -> str:
    """Of a run's folder the best checkpoint, else the newest; any other model as it is."""
    from grpo.run.checkpoint import CheckpointFolder

    checkpoints = CheckpointFolder(Path(model) / "checkpoints", keep=1)
    if not checkpoints.folder.is_dir():
        return model
    chosen = checkpoints.best
    if chosen is None and (newest := checkpoints.newest_intact()):  # which reads all of its files
        chosen = newest.folder
    if chosen is None:
        raise ValueError(f"model is {model!r}, a run without a checkpoint: let it train on, or name a model")
    logger.info("evaluating {}", chosen)
    return str(chosen)


def main() -> int:
    """Run the command line."""
    try:
        show(tyro.cli(EvaluateConfig))
    except (ValueError, EngineError) as error:
        print_error(screen(stderr=True), error)
        return WRONG_SETTING
    return DONE


def show(config: EvaluateConfig) -> None:
    """Measure, print, and save what is to be saved."""
    # Imported here and below: a wrong flag need not wait for the large libraries.
    from grpo.evaluate import Evaluation, comparison_table, read_mates, results_table

    console = screen()
    configure_logging("INFO", console)
    before = Evaluation.load(config.before) if config.before else None
    mates = read_mates(config.mate_in_one)[: config.limit] if config.mate_in_one else []
    results = measure(config, mates)
    if config.json:
        results.save(config.json)
    console.print(results_table(results, title=config.model))
    if before:
        console.print(comparison_table(before, results, title=f"before: {config.before}"))


def measure(config: EvaluateConfig, mates: list[chess.Board]) -> "Evaluation":
    """The held-out prompts' columns, and those of games and mates where these are asked for."""
    from grpo.data import check_spec, load_prompts
    from grpo.evaluate import evaluate, mate_in_one, self_play
    from grpo.model.load import RolloutModel, load_policy
    from grpo.model.target import choose_device, choose_model
    from grpo.run.loading import prompt_room

    settings = config.sampling
    device = choose_device(config.device)
    with ExitStack() as stack:
        engine = None
        if config.stockfish or config.stockfish_path:
            engine = stack.enter_context(EnginePool(config.stockfish_path, depth=config.engine_depth))
        check_spec(config.prompts)
        name = choose_model(checkpoint_of(config.model), device)
        heldout = load_prompts(
            config.prompts, seed=config.seed, heldout_share=config.heldout_share, heldout_count=config.limit,
            max_bad_share=config.max_bad_share, trailing_space=config.trailing_space,
            room=prompt_room(name, config.max_new_tokens),
        ).heldout  # fmt: skip
        policy = load_policy(name, device, config.precision)
        model, tokenizer = RolloutModel(policy.model, policy.target.dtype).model, policy.tokenizer
        results = evaluate(
            model, tokenizer, heldout, settings=settings, rows=config.rows, seed=config.seed,
            samples=config.samples, engine=engine,
        )  # fmt: skip
    if not results.scores:
        raise ValueError(f"{config.prompts} holds prompts of your own, which only rewards can score")
    if "policy/legal" in results.scores and "policy/best_move" not in results.scores:
        logger.info("the prompts have no labels: --stockfish ranks the moves for best_move and top5")
    if config.self_play:
        fens = [prompt.columns["fen"] for prompt in heldout if prompt.task == "policy"]
        results |= self_play(
            model, tokenizer, config.self_play, settings=settings, rows=config.rows, seed=config.seed,
            fens=fens if config.self_play_from == "prompts" else None, trailing_space=config.trailing_space,
        )  # fmt: skip
    if mates:
        results |= mate_in_one(
            model, tokenizer, mates, settings=settings, rows=config.rows, seed=config.seed,
            trailing_space=config.trailing_space,
        )  # fmt: skip
    return results
