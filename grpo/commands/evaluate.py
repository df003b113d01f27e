"""Held-out quality of a model, in the RookWorld README's columns with 95 % intervals."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import chess
import tyro
from loguru import logger
from rich.console import Console

from grpo.config import CONFIG_FILE, Config
from grpo.config.groups import Precision, PromptSettings, SamplingSettings
from grpo.config.limits import COUNT, NOT_NEGATIVE, Settings
from grpo.data.gym import rewards_for
from grpo.data.kept_files import are_same_prompts, settings_of_run
from grpo.data.load import IN_MEMORY, check_spec
from grpo.data.reward_files import (
    KNOWN_REWARDS,
    PROMPTS_LOOKED_AT,
    load_rewards,
    resolve_max_new_tokens,
    reward_file,
)
from grpo.errors import UserError

if TYPE_CHECKING:
    from grpo.data.reward_functions import RewardFunctions
    from grpo.evaluate import Evaluation
    from grpo.prompt import Prompt
    from grpo.rewards import EnginePool
    from grpo.run.trained import TrainedModel


USUAL_LIMIT = 1000
"""Prompts of each task."""


@dataclass(frozen=True)
class EvaluateConfig(Settings):
    """Evaluate models or runs on held-out prompts, greedily and sampled; several stand side by side."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Each auto, rook-tiny, a hub id, a model's folder, or a run's, of which model/ is taken."""
    prompts: str | None = None
    """bundled, or a file or a dataset on the hub, of which all is used; None, or what the first run that is
    named was trained on: the part that was held out of it."""
    reward: tuple[str, ...] = ()
    """Rewards to judge by: names, or functions as file.py:name; none given: those of the first run named."""
    reward_weights: tuple[float, ...] = ()
    """One weight a reward; none given: 1 each."""
    prompt_settings: tyro.conf.OmitArgPrefixes[PromptSettings] = field(default_factory=PromptSettings)
    heldout_share: float | None = None
    """Share of the prompts that is used (bundled: is split already); None: the part that the run held out, or
    all of other prompts."""
    max_bad_share: float | None = None
    """More rows than this that cannot be read, or whose prompt is too long for the model, are an error; None:
    the run's, or 0.01."""
    limit: Annotated[int, COUNT] | None = None
    """Most prompts of each task, and most positions of --mate-in-one; None: 1,000, of other prompts all."""
    self_play: Annotated[int, NOT_NEGATIVE] = 0
    """Games to play against itself, each until the first illegal move."""
    self_play_from: Literal["openings", "prompts"] = "openings"
    """Start them after four random half-moves, or at held-out positions (for a model of endgames)."""
    mate_in_one: Path | None = None
    """BIG-bench's checkmate_in_one task.json."""
    temperature: float | None = None
    """Sampling temperature, 0 is greedy; None: both, greedy and at the run's (1 without a run)."""
    samples: Annotated[int, COUNT] = 1
    """Completions a prompt where the temperature is above 0."""
    max_new_tokens: Annotated[int | None, COUNT] = None
    """Longest completion in tokens; None: the run's, or as in training."""
    stockfish: bool = False
    """Rank moves with Stockfish instead of by the prompts' labels, as is done without it for a run that
    was trained so."""
    labels: bool = False
    """Rank moves by the prompts' labels, also for a run that was trained by Stockfish."""
    stockfish_path: str | None = None
    """Rank moves with this executable."""
    engine_depth: Annotated[int | None, COUNT] = None
    """Plies Stockfish searches; None: the run's, or 8."""
    rows: Annotated[int, COUNT] = 128
    """Completions on the device at once."""
    seed: int = 0
    """Seed of sampling, and of where games start."""
    device: str = "auto"
    """auto is the accelerator, if there is one."""
    precision: Precision | None = None
    """Dtype of matrix products; auto is bf16 where the device has it; None: the run's, or auto."""
    json: Path | None = None
    """Save the scores of one model here."""
    before: Path | None = None
    """Compare one model with scores that --json saved here."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if not self.models:
            yield "no model is named: give one or more, such as rook-tiny or runs/NAME"
        for name in ("json", "before"):
            if getattr(self, name) is not None and len(self.models) > 1:
                yield f"--{name} is for one model, and {len(self.models)} are named: name one"
        if self.labels and (self.stockfish or self.stockfish_path):
            yield "--labels and Stockfish are both to rank moves: leave one of the two out"
        if self.json is not None and not self.json.parent.is_dir():
            yield f"--json {self.json}: there is no folder {self.json.parent}, make it first"
        _ = self.modes  # whose settings check themselves

    @property
    def runs(self) -> list[Path]:
        """The models that are folders of runs."""
        return [Path(model) for model in self.models if (Path(model) / CONFIG_FILE).is_file()]

    @property
    def most_prompts(self) -> int:
        """How many prompts of each task are evaluated, and how many positions of --mate-in-one."""
        return self.limit or (sys.maxsize if self.has_other_prompts else USUAL_LIMIT)

    @property
    def has_other_prompts(self) -> bool:
        """Whether the prompts that are named are not those that the run was trained on."""
        if self.prompts is None:
            return False
        return not (self.runs and are_same_prompts(self.prompts, self._base.prompts))

    @cached_property
    def _base(self) -> Config:
        """The first run's settings, or the defaults."""
        if not self.runs:
            return Config()
        return settings_of_run(str(self.runs[0])) or Config()

    @cached_property
    def task(self) -> Config:
        """Settings of the first run that is named, or the defaults, changed by the flags."""
        base = self._base
        in_python = [name for name in base.reward if ":" not in name and name not in KNOWN_REWARDS]
        without_rows = self.prompts is None and base.prompts == IN_MEMORY
        if in_python and (not self.reward or without_rows):
            raise UserError(
                f"{self.runs[0]} was trained in Python, with reward {', '.join(in_python)}: give --reward "
                "file.py:name, and --prompts FILE if those were rows in memory"
            )
        names = ("prompts", "max_bad_share", "max_new_tokens", "engine_depth", "stockfish_path", "precision")
        changes = {name: value for name in names if (value := getattr(self, name)) is not None}
        share = 1.0 if self.has_other_prompts and self.heldout_share is None else self.heldout_share
        if share is not None:
            changes["heldout_share"] = share
        if self.reward:
            changes |= {"reward": self.reward, "reward_weights": self.reward_weights}
        if self.prompt_settings != PromptSettings():
            changes |= vars(self.prompt_settings)
        task = replace(base, **changes)
        return resolve_max_new_tokens(replace(task, reward=rewards_for(task.prompts, task.reward)))

    @property
    def wants_engine(self) -> bool:
        """Whether Stockfish ranks moves: where it is asked for, or the run was trained so."""
        if self.labels:
            return False
        return self.stockfish or self.stockfish_path is not None or bool(self.runs)

    @property
    def modes(self) -> dict[str, SamplingSettings]:
        """Sampling settings by name."""
        if self.temperature is None:
            return {"greedy": SamplingSettings.of(self.task, temperature=0.0), "sampled": self.task}
        name = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        return {name: SamplingSettings.of(self.task, temperature=self.temperature)}


def main(config: EvaluateConfig, console: Console) -> None:
    """Measure, print, and save what is to be saved."""
    check_spec(config.task.prompts)
    load_rewards(config.task.reward, config.task.reward_weights)
    logger.info("loading torch and {}", ", ".join(config.models))
    # Imported here and below: a wrong flag need not wait for the large libraries.
    from grpo.evaluate import Evaluation, results_table
    from grpo.evaluate.scores import SAMPLED
    from grpo.play.self_play import read_mates

    before = Evaluation.load(config.before) if config.before else None
    mates = read_mates(config.mate_in_one)[: config.most_prompts] if config.mate_in_one else []
    by_model = {model: measure(config, model, mates) for model in config.models}
    if len(by_model) > 1:
        for mode in config.modes:
            evaluations = {model: results[mode] for model, results in by_model.items()}
            console.print(results_table(evaluations, title=mode, compared=True))
        return
    ((model, results),) = by_model.items()
    console.print(results_table(results, title=model))
    columns, *sampled = results.values()
    for evaluation in sampled:
        columns |= evaluation.prefixed(SAMPLED)
    if config.json:
        columns.save(config.json)
    if before:
        both = {"before": before, "after": columns}
        console.print(results_table(both, title=f"before: {config.before}", compared=True))
        if other := before.of_other_prompts(columns):
            raise UserError(
                f"--before {config.before} is of other prompts in {', '.join(other)}: evaluate both on the "
                "same ones, as --limit and --prompts say"
            )


def measure(config: EvaluateConfig, model: str, mates: list[chess.Board]) -> "dict[str, Evaluation]":
    """Evaluate a model in each mode; the first also has the columns of games and mates, if asked for."""
    from grpo.evaluate import evaluate
    from grpo.run.trained import TrainedModel

    trained = TrainedModel.of(model, config.device, config.task)
    heldout = trained.prompts(seed=config.seed, heldout_count=config.most_prompts).heldout
    with ExitStack() as stack:
        engine, judge = open_judge(config, heldout, stack)
        results = {
            mode: evaluate(
                trained.sampler,
                trained.policy.tokenizer,
                heldout,
                settings=settings,
                samples=config.samples,
                engine=engine,
                judge=judge,
                rows=config.rows,
                seed=config.seed,
            )
            for mode, settings in config.modes.items()
        }
    mode, columns = next(iter(results.items()))
    if not columns.scores:
        raise UserError(
            f"{config.task.prompts} holds prompts of your own, which only rewards can score: give --reward "
            "file.py:name, or name the run that was trained on them"
        )
    if "policy/legal" in columns.scores and "policy/best_move" not in columns.scores:
        logger.info("the prompts have no labels: --stockfish ranks the moves for best_move and top5")
    if config.self_play or mates:
        columns |= play(config, trained, heldout, mates)
    return {**results, mode: columns}


def open_judge(
    config: EvaluateConfig, heldout: "Sequence[Prompt]", stack: ExitStack
) -> "tuple[EnginePool | None, RewardFunctions | None]":
    """The engine that ranks moves, and the rewards, each None where it is not wanted. ValueError for rewards
    that these prompts are not for.
    """
    from grpo.data.reward_functions import RewardFunctions
    from grpo.run.setup import start_engine

    task, tasks, engine, judge = config.task, {prompt.task for prompt in heldout}, None, None
    if config.wants_engine and "policy" in tasks:
        is_asked_for = config.stockfish or config.stockfish_path is not None
        engine = start_engine(replace(task, engine="auto") if is_asked_for else task, stack)
        if engine is None and is_asked_for:
            raise UserError("--stockfish: none was found; give --stockfish-path, or leave it out")
    _say_judge(config, tasks, engine)
    if config.reward or config.runs:
        judge = RewardFunctions(task.reward, task.reward_weights).with_engine(engine)
        judge.check(tasks, heldout[:PROMPTS_LOOKED_AT])
    return engine, judge


def play(
    config: EvaluateConfig, trained: "TrainedModel", heldout: "Sequence[Prompt]", mates: list[chess.Board]
) -> "Evaluation":
    """The columns of games against itself and of mates in one, as far as they are asked for."""
    from grpo.evaluate import Evaluation
    from grpo.play.player import make_player
    from grpo.play.self_play import mate_in_one, self_play

    settings, columns = next(iter(config.modes.values())), Evaluation({}, {})
    player = make_player(trained, temperature=settings.temperature, rows=config.rows)
    if config.self_play:
        fens = [prompt.columns["fen"] for prompt in heldout if prompt.task == "policy"]
        starts = fens if config.self_play_from == "prompts" else None
        columns |= self_play(player, config.self_play, fens=starts, seed=config.seed)
    if mates:
        columns |= mate_in_one(player, mates, seed=config.seed)
    return columns


def _say_judge(config: EvaluateConfig, tasks: set[str], engine: "EnginePool | None") -> None:
    """Tell by what completions are judged, and where that comes from."""
    task, judges = config.task, list[str]()
    if config.reward or config.runs:
        judges.append(f"rewards {', '.join(reward_file(spec)[1] for spec in task.reward)}")
    if "policy" in tasks:
        depth = f"Stockfish at depth {task.engine_depth}"
        judges.append(f"moves ranked by {'the labels of the prompts' if engine is None else depth}")
    source = f"as {config.runs[0]} was trained" if config.runs and not config.reward else "as the flags say"
    if judges:
        logger.info("judged by {} ({})", ", ".join(judges), source)
