"""What a person tells the calculator, and what is wrong with it if it is wrong."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import tyro

from grpo.config import SettingsError
from grpo.config.groups import LoraSettings
from grpo.config.limits import COUNT, Limit
from grpo.workbench.calculator.cards import Card, card_of_size, find_card
from grpo.workbench.flags import StepFlags

Weights = Literal["bf16+master", "fp32", "bf16"]
Optimizer = Literal["adamw", "adamw-8bit", "sgd"]
FrozenDtype = Literal["fp32", "bf16", "int8", "int4"]

SOME = Limit(lambda share: 0 < share <= 1, "give a share above 0 and up to 1, such as 0.85")
LESS_THAN_ALL = Limit(lambda share: 0 <= share < 1, "give a share from 0 to below 1")
MOST_PARAMETERS = 1e15
OF_MODELS = ("objective", "prompt_tokens", "precision", "lora_rank", "load_in_4bit")
"""Settings that count only where a model is given."""


@dataclass(frozen=True)
class CalculatorSettings(StepFlags):
    """The largest batch for a card, and its memory line by line; no device is needed.

    From a model (rook-tiny, --model, --arch), or with --trainable from counts of parameters alone.
    """

    gpu: str | None = None
    """A card such as h100; without it, all that are known are listed."""
    gpu_memory: str | None = None
    """Instead of gpu: any card by the size it is sold with, such as 20GB."""
    gpus: Annotated[int, COUNT] = 1
    """Cards; totals are shown for 1, 2, 4 and 8 besides."""
    accumulate: Annotated[int, COUNT] = 1
    """Passes to an optimizer step; totals are so many times larger."""
    memory_utilization: Annotated[float, SOME] = 0.85
    """Share of the card that totals and profiles are for; 80, 85 and 90 % are shown besides."""
    batch_size: Annotated[int | None, COUNT] = None
    """A card's batch now: what it leaves unused."""
    max_batch_size: Annotated[int, COUNT] = 65536
    """What is not exceeded."""

    load_in_4bit: bool = False
    """Hold the model's own weights in 4 bits (QLoRA), with lora_rank."""

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
    measured_share: Annotated[float | None, SOME] = None
    """Share of the card that batch_size was seen to hold: gives bytes a sample (counts alone)."""
    sample_memory: str | None = None
    """Memory a sample, such as 450MB (counts alone)."""

    yaml: Path | None = None
    """Write profiles for train_lean.py --config FILE --profile NAME."""
    json: Path | None = None
    """Write all figures."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.lora
        for wrong in chain(_wrong_numbers(self), _wrong_together(self), _wrong_for_counts(self)):
            raise SettingsError(wrong)

    @property
    def from_counts(self) -> bool:
        return self.trainable is not None

    @property
    def lora(self) -> LoraSettings:
        """ValueError for 4 bits without adapters."""
        return LoraSettings(self.lora_rank, load_in_4bit=self.load_in_4bit)

    def card(self) -> Card | None:
        """SettingsError for one that is not known."""
        if self.gpu is not None:
            return find_card(self.gpu)
        return card_of_size(self.gpu_memory) if self.gpu_memory is not None else None


def _wrong_numbers(settings: CalculatorSettings) -> Iterator[str]:
    trainable = () if settings.trainable is None else (("trainable", settings.trainable),)
    for name, count in (*trainable, *(("frozen", count) for count in settings.frozen)):
        if not 1 <= count < MOST_PARAMETERS:
            yield f"{name} is {count:g}: give a number of parameters, such as 8e9."


def _wrong_together(settings: CalculatorSettings) -> Iterator[str]:
    if settings.gpu is not None and settings.gpu_memory is not None:
        yield f"gpu is {settings.gpu!r} and gpu_memory {settings.gpu_memory!r}: give one of the two."
    if settings.yaml is not None and settings.objective == "lm":
        yield f"yaml is {settings.yaml}, for train_lean.py, which trains by GRPO: leave out --objective lm."
    size, group = settings.batch_size, settings.group_size
    if size is not None and size % group and settings.objective == "grpo" and not settings.from_counts:
        below, above = size // group * group, -(-size // group) * group
        nearest = f"{below} or {above}" if below else f"{above}"
        yield (
            f"batch_size is {size}, which is not a multiple of group_size {group}: give {nearest}, or "
            "another --group-size."
        )
    for name, file in (("yaml", settings.yaml), ("json", settings.json)):
        if file is not None and not file.parent.is_dir():
            yield f"{name} is {file}: there is no folder {file.parent}, make it first."


def _wrong_for_counts(settings: CalculatorSettings) -> Iterator[str]:
    """What only counts alone have, what only models have, and what belongs to a measured batch."""
    named = settings.model.model or settings.model.arch
    if settings.from_counts and named is not None:
        yield f"trainable is {settings.trainable:g}, and there is a model, {named}: give one of the two."
    for name in ("weights", "optimizer", "measured_share", "sample_memory"):
        value = getattr(settings, name)
        if value is not None and not settings.from_counts:
            yield (
                f"{name} is {value}, but a model's memory is predicted: leave it out, or give counts with "
                "--trainable instead of a model."
            )
    for item in fields(settings):
        value = getattr(settings, item.name)
        if settings.from_counts and item.name in OF_MODELS and value != item.default:
            yield f"{item.name} is {value}, which counts alone do not know: leave it out, or --trainable."
    share = settings.measured_share
    if share is not None and settings.batch_size is None:
        yield f"measured_share is {share}, of which batch? Add --batch-size."
    if share is not None and settings.sample_memory is not None:
        yield f"measured_share is {share} and sample_memory {settings.sample_memory}: give one of the two."
