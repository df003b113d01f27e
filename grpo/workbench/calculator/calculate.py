"""Which batch fits a card that is not there: the figures that follow from a card and a demand.

The budget comes from a model, by the trainer's own predictor, or from counts of parameters alone.
Printing is in `tables.py`, profiles for `train_lean.py` in `profiles.py`.
"""

from dataclasses import dataclass

import torch

from grpo.config import SettingsError
from grpo.config.groups import Precision
from grpo.config.sizes import parse_size
from grpo.memory.budget import CONTEXT_BYTES, GB, readable
from grpo.model.target import compute_dtype
from grpo.workbench.calculator.cards import Card
from grpo.workbench.calculator.demand import (
    OVERHEAD_SHARE,
    Demand,
    Line,
    Peak,
    demand_of_counts,
    demand_of_model,
    frozen_lines,
    trained_lines,
)
from grpo.workbench.calculator.settings import CalculatorSettings
from grpo.workbench.predict import step_settings

SHARES = (0.8, 0.85, 0.9)
"""Of the card, that batches are calculated for besides memory_utilization."""
NUM_CARDS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Row:
    """A share of the card: what is left for samples there, and the largest batch, if it can be known."""

    share: float
    usable_bytes: float
    left_bytes: float
    batch_size: int | None
    peak: Peak | None


@dataclass(frozen=True)
class Use:
    """What a batch holds of the card; `measured` or else calculated."""

    batch_size: int
    bytes: float
    measured: bool


@dataclass(frozen=True)
class Calculation:
    """All figures. `precision` is None with counts alone."""

    settings: CalculatorSettings
    card: Card
    precision: Precision | None
    demand: Demand
    rows: tuple[Row, ...]
    use: Use | None

    @property
    def row(self) -> Row:
        """The one of memory_utilization."""
        return next(row for row in self.rows if row.share == self.settings.memory_utilization)

    def totals(self) -> dict[int, int]:
        """Samples an optimizer step by number of cards; {} where a card's batch is not known."""
        size = self.row.batch_size
        if size is None:
            return {}
        return {
            count: count * size * self.settings.accumulate
            for count in sorted({*NUM_CARDS, self.settings.gpus})
        }


def calculate(settings: CalculatorSettings, card: Card) -> Calculation:
    """All figures for a card. ValueError for what a user can mend."""
    total, precision = card.usable_bytes, None
    frozen, overhead = frozen_lines(settings.frozen, settings.frozen_dtype), _overhead(settings, card)
    _check_fixed(settings, card, (*frozen, overhead))  # before anything slow starts
    if settings.trainable is not None:
        trained = trained_lines(
            settings.trainable, settings.weights or "bf16+master", settings.optimizer or "adamw"
        )
        lines = (*frozen, *trained, overhead)
        size = _sample_bytes(settings, card, lines)
        demand = demand_of_counts(lines, size, at_most=settings.max_batch_size)
    else:
        precision = _precision(settings, card)
        step = step_settings(
            settings.model, compute_dtype(precision, torch.device("cuda")), "cuda",
            objective=settings.objective, prompt_tokens=settings.prompt_tokens,
            max_new_tokens=settings.max_new_tokens, group_size=settings.group_size, kl=settings.kl,
            checkpointing=settings.gradient_checkpointing, lora=settings.lora,
        )  # fmt: skip
        demand = demand_of_model(step, frozen, overhead, at_most=settings.max_batch_size)
    _check_fixed(settings, card, demand.lines)
    shares = sorted({*SHARES, settings.memory_utilization})
    return Calculation(
        settings, card, precision, demand, tuple(_row(demand, total, share) for share in shares),
        _use(settings, card, demand),
    )  # fmt: skip


def _overhead(settings: CalculatorSettings, card: Card) -> Line:
    share = settings.overhead_share
    if share is None and not settings.from_counts:
        return Line("overhead", CONTEXT_BYTES, "CUDA context and cuBLAS's workspace")
    share = OVERHEAD_SHARE if share is None else share
    return Line("overhead", share * card.usable_bytes, f"{100 * share:g} % of the card", share)


def _use(settings: CalculatorSettings, card: Card, demand: Demand) -> Use | None:
    """What the batch of now holds; None where there is none, or nobody knows."""
    size, share = settings.batch_size, settings.measured_share
    if size is not None and share is not None:
        return Use(size, share * card.usable_bytes, True)
    if size is None or demand.samples is None:
        return None
    return Use(size, demand.samples.peak(size).bytes, False)


def _row(demand: Demand, total_bytes: float, share: float) -> Row:
    usable = share * total_bytes
    size = demand.samples.largest(usable) if demand.samples else None
    peak = demand.samples.peak(size) if demand.samples and size else None
    return Row(share, usable, usable - demand.fixed_bytes, size, peak)


def _check_fixed(settings: CalculatorSettings, card: Card, lines: tuple[Line, ...]) -> None:
    """SettingsError where the lines alone are more than the card."""
    held = sum(line.bytes for line in lines)
    if held < card.usable_bytes:
        return
    given = " and ".join(f"{count / 1e9:g} B" for count in settings.frozen)
    what = f"frozen is {given} in {settings.frozen_dtype}" if given else f"model is {settings.model.name}"
    if settings.from_counts and not given:
        what = f"trainable is {(settings.trainable or 0) / 1e9:g} B"
    raise SettingsError(
        f"{what}: {', '.join(f'{line.name}: {readable(line.bytes)}' for line in lines)}; that is "
        f"{readable(held)} before any sample, and {card.name} offers {readable(card.usable_bytes)}: give "
        f"{'fewer or smaller ones' if given else 'a smaller one'}, or a larger card with --gpu."
    )


def _sample_bytes(settings: CalculatorSettings, card: Card, lines: tuple[Line, ...]) -> float | None:
    """Of a sample, as the person gave it or as it follows from a measured batch; None: not known."""
    if settings.sample_memory is not None:
        try:
            return parse_size(settings.sample_memory)
        except ValueError as error:
            raise SettingsError(f"sample_memory is {error}") from error
    if settings.measured_share is None or settings.batch_size is None:
        return None
    added = settings.measured_share * card.usable_bytes - sum(line.bytes for line in lines)
    return added / settings.batch_size if added > 0 else None


def _precision(settings: CalculatorSettings, card: Card) -> Precision:
    if settings.precision != "auto":
        return settings.precision
    return "bf16" if card.bf16 else "fp32"


def idle_sentences(found: Calculation) -> list[str]:
    """What the batch of now leaves of the card, and whether it agrees with the lines."""
    use, total, fixed = found.use, found.card.usable_bytes, found.demand.fixed_bytes
    if use is None:
        return []
    how = "measured" if use.measured else "calculated"
    holds = f"Batch {use.batch_size} holds {use.bytes / GB:.2f} GB, {use.bytes / total:.0%} ({how})"
    if use.bytes > total:
        return [f"{holds}: more than the card has. train_lean.py would do it in parts."]
    said = [f"{holds}: {(total - use.bytes) / GB:.2f} GB of {total / GB:.2f} lie idle."]
    if use.measured and use.bytes <= fixed:
        said.append(
            f"The budget's lines come to {fixed / GB:.2f} GB without any sample, which is more: it is not of "
            "the run that was measured, so bytes a sample do not follow."
        )
    return said
