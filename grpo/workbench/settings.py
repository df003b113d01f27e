"""What the commands of the workbench can be told: the flags of train_lean.py, and some of their own.

Settings alone, read and checked before torch is loaded. Every class but `CheckSettings` has a field `train`,
which `--config FILE` fills, too.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from grpo.config import Config, SettingsError
from grpo.config.groups import Precision
from grpo.config.limits import COUNT, Limit, check_limits
from grpo.config.reading import take_config
from grpo.workbench.cards import Card, card_of_size, find_card
from grpo.workbench.task import MadeModel, Objective


def parse_flags(kind: Any, arguments: Sequence[str] | None, base: Config, **defaults: Any) -> Any:
    """Settings from the command line, over `base` and a file.

    SettingsError for what is wrong, and for flags of `kind.CHOSEN`, which the command sets by itself.
    """
    base, words = take_config(sys.argv[1:] if arguments is None else arguments, base)
    for word in words:
        flag = word.partition("=")[0]
        if flag.removeprefix("--").replace("-", "_") in kind.CHOSEN:
            raise SettingsError(f"{flag} is given, which is chosen by itself here: leave it out.")
    start = kind(train=base, **defaults)
    return tyro.cli(kind, args=words, default=start, config=(tyro.conf.OmitArgPrefixes,))


def check_objective(objective: Objective, made: MadeModel) -> None:
    """SettingsError for GRPO on a model that is made."""
    if objective == "grpo" and made.arch is not None:
        raise SettingsError(
            f"arch is {made.arch!r}, but grpo improves a model that can write already: give --model."
        )


# ------------------------------------------------------------------------------------------ find-max


@dataclass(frozen=True)
class FindMax:
    """The largest batch size that fits this device, by real training steps.

    Other flags are those of train_lean.py, which `--config FILE` holds, too.
    """

    CHOSEN = ("batch_size", "steps", "minutes", "rollout_rows", "score_rows", "train_rows", "resume",
              "dry_run", "device_memory", "name", "memory_utilization")  # fmt: skip

    objective: Objective = "grpo"
    """grpo: sample, score and learn, all rows at once. lm: plain language modelling."""
    data: str | None = None
    """Text to learn from (lm); bundled: chess positions and moves, 0.8 MB."""
    strategy: Literal["line", "classic"] = "line"
    """line: what memory over the sizes tried allows, at most 8 trials. classic: 16 more or half."""
    start: Annotated[int, COUNT] = 64
    """Batch size of the first trial."""
    prompt_tokens: Annotated[int | None, COUNT] = None
    """Of all prompts, which are then made up (grpo); None: the prompts of --prompts."""
    output: Path | None = None
    """Folder of the table, JSON and picture; None: runs/max-batch- and the time."""
    made: MadeModel = field(default_factory=MadeModel)
    train: Config = field(default_factory=Config)

    def __post_init__(self) -> None:
        check_limits(self)
        check_objective(self.objective, self.made)

    @property
    def multiple(self) -> int:
        """What batches are multiples of."""
        return self.train.group_size if self.objective == "grpo" else 1


def parse_find_max(arguments: Sequence[str] | None = None) -> FindMax:
    """From the command line. SettingsError for what is wrong."""
    return parse_flags(FindMax, arguments, Config())


def new_folder(kind: str) -> Path:
    """Where results go if nobody says."""
    return Path("runs") / f"{kind}-{datetime.now():%Y%m%d-%H%M%S}"


# ----------------------------------------------------------------------------------------- calculate

Weights = Literal["bf16+master", "fp32", "bf16"]
Optimizer = Literal["adamw", "adamw-8bit", "sgd"]
FrozenDtype = Literal["fp32", "bf16", "int8", "int4"]
LESS_THAN_ALL = Limit(lambda share: 0 <= share < 1, "give a share from 0 to below 1")
MOST_PARAMETERS = 1e15
ON_A_CARD = Config(max_batch_size=65536)
"""Defaults of the calculator."""


@dataclass(frozen=True)
class Calculator:
    """The largest batch for a card, and its memory line by line; no device is needed.

    From a model, with the flags of train_lean.py, or with --trainable from counts of parameters alone.
    """

    CHOSEN = ("device", "device_memory", "dry_run", "resume", "name", "shard", "memory_limit")

    gpu: str | None = None
    """A card such as h100; without it, all that are known are listed."""
    gpu_memory: str | None = None
    """Instead of gpu: any card by the size it is sold with, such as 20GB."""
    gpus: Annotated[int, COUNT] = 1
    """Cards; totals are shown for 1, 2, 4 and 8 besides."""
    accumulate: Annotated[int, COUNT] = 1
    """Passes to an optimizer step; totals are so many times larger."""
    prompt_tokens: Annotated[int | None, COUNT] = None
    """Of the longest prompt; None: of the prompts of --prompts."""

    # Models that only stand beside
    frozen: tyro.conf.UseAppendAction[tuple[float, ...]] = ()
    """Parameters of a frozen model, such as 8e9; give it once for each."""
    frozen_dtype: FrozenDtype = "bf16"
    """Of frozen models."""

    # Counts alone
    trainable: float | None = None
    """Parameters that are trained, such as 1e8: a budget from counts alone, of any trainer."""
    weights: Weights | None = None
    """Of trained parameters (counts alone). None: bf16+master, in bf16 with a copy in fp32."""
    optimizer: Optimizer | None = None
    """Of trained parameters (counts alone). None: adamw."""
    overhead_share: Annotated[float | None, LESS_THAN_ALL] = None
    """Share of the card for what is no tensor. None: 0.08 with counts, with a model a CUDA context."""
    sample_memory: str | None = None
    """Memory a sample, such as 450MB (counts alone)."""

    yaml: Path | None = None
    """Write profiles for train_lean.py --config FILE --profile NAME."""
    json: Path | None = None
    """Write all figures."""
    train: Config = ON_A_CARD

    def __post_init__(self) -> None:
        check_limits(self)
        for wrong in _wrong_counts(self):
            raise SettingsError(wrong)

    def card(self) -> Card | None:
        """SettingsError for one that is not known."""
        if self.gpu is not None:
            return find_card(self.gpu)
        return card_of_size(self.gpu_memory) if self.gpu_memory is not None else None


def parse_calculator(arguments: Sequence[str] | None = None) -> Calculator:
    """From the command line. SettingsError for what is wrong."""
    return parse_flags(Calculator, arguments, ON_A_CARD)


def _wrong_counts(settings: Calculator) -> Iterator[str]:
    trainable, model = settings.trainable, settings.train.model
    counts = [] if trainable is None else [("trainable", trainable)]
    for name, count in (*counts, *(("frozen", count) for count in settings.frozen)):
        if not 1 <= count < MOST_PARAMETERS:
            yield f"{name} is {count:g}: give a number of parameters, such as 8e9."
    if settings.gpu is not None and settings.gpu_memory is not None:
        yield f"gpu is {settings.gpu!r} and gpu_memory {settings.gpu_memory!r}: give one of the two."
    for name in ("yaml", "json"):
        file = getattr(settings, name)
        if file is not None and not file.parent.is_dir():
            yield f"{name} is {file}: there is no folder {file.parent}, make it first."
    if trainable is None:
        for name in ("weights", "optimizer", "sample_memory"):
            if (value := getattr(settings, name)) is not None:
                yield (
                    f"{name} is {value}, but a model's memory is planned: leave it out, or give counts with "
                    "--trainable instead of a model."
                )
        return
    if model != "auto":
        yield f"trainable is {trainable:g}, and there is a model, {model}: give one of the two."
    if settings.prompt_tokens or settings.train.uses_lora:
        name = "prompt_tokens" if settings.prompt_tokens else "lora_rank"
        value = settings.prompt_tokens or settings.train.lora_rank
        yield f"{name} is {value}, which counts alone do not know: leave it out, or --trainable."


# --------------------------------------------------------------------------------------------- check


@dataclass(frozen=True)
class CheckSettings:
    """Measure training on this machine, and say which switches are off."""

    model: str = "auto"
    """Hub id or folder of the model whose shape is trained, from random weights; auto: rook-tiny."""
    made: MadeModel = field(default_factory=MadeModel)
    batch_size: Annotated[int, COUNT] = 8
    """Windows of --context tokens in a step."""
    steps: Annotated[int, COUNT] = 3
    """Steps that are timed, at least, after a first one that is not."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps."""
    precision: Precision = "auto"
    """Dtype of matrix products; auto: bf16 where native."""
    compile: bool = False
    """Time a compiled step as well: on a CPU compiling takes about a minute."""

    def __post_init__(self) -> None:
        check_limits(self)


def parse_check() -> CheckSettings:
    """From the command line."""
    return tyro.cli(CheckSettings, config=(tyro.conf.OmitArgPrefixes,))
