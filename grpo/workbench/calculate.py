"""Which batch fits a card that is not there, and what holds the rest of it; no device is needed.

From a model, by the trainer's own plan on tensors without storage; or from counts of parameters alone, of any
trainer, as published budgets do: bytes a sample then come from the person, or no batch follows.
"""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo.config import SettingsError, to_flat
from grpo.config.sizes import GB, parse_size
from grpo.memory import Fit
from grpo.memory.budget import CONTEXT_BYTES, DeviceMemory, readable
from grpo.plan.absent import see_trace
from grpo.plan.trace import Card as TracedCard
from grpo.plan.trace import TracedPhases
from grpo.plan.warm_up import largest_batch, warm_up
from grpo.plan.workload import Workload
from grpo.run.dry_run import workload
from grpo.workbench.cards import Card
from grpo.workbench.settings import ON_A_CARD, Calculator, FrozenDtype, Optimizer, Weights
from grpo.workbench.tables import Row

SHARES, NUM_CARDS = (0.8, 0.85, 0.9), (1, 2, 4, 8)
"""Of the card, and cards, that batches are calculated for besides those that are asked for."""
FROZEN_BYTES: dict[FrozenDtype, float] = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5}
"""Of a frozen parameter; scales of quantized ones are left out."""
MOMENT_BYTES: dict[Optimizer, int] = {"adamw": 8, "adamw-8bit": 2, "sgd": 0}
"""Of a trained parameter: AdamW's two moments in fp32, or in 8 bits; plain SGD has none."""
WEIGHT_BYTES: dict[Weights, int] = {"bf16+master": 2, "fp32": 4, "bf16": 2}
"""Of a trained parameter, and of its gradient."""
MASTER_BYTES: dict[Weights, int] = {"bf16+master": 4, "fp32": 0, "bf16": 0}
"""Of the fp32 copy that the optimizer keeps beside weights in bf16."""
OVERHEAD_SHARE = 0.08
"""Of the card, for what is no tensor; with counts alone, as published budgets have it."""
NOMINAL_GB = 10**9
CARD_NAMES = {1: "single", 2: "dual", 4: "quad", 8: "octo"}


@dataclass(frozen=True)
class Line:
    """One line of the budget in bytes. `share` of the card, where it is one."""

    name: str
    bytes: float
    detail: str
    share: float | None = None


@dataclass(frozen=True)
class Share:
    """A share of the card: what is left for samples there, the largest batch, and which phase is fullest.

    batch_size: 0 where not a group fits, None where nobody knows what a sample takes.
    """

    share: float
    usable_bytes: float
    left_bytes: float
    batch_size: int | None
    fullest: str | None = None
    peak_bytes: float | None = None


@dataclass(frozen=True)
class Calculation:
    """All figures. `work` is None with counts alone."""

    settings: Calculator
    card: Card
    lines: Sequence[Line]
    shares: Sequence[Share]
    work: Workload | None = None

    @property
    def fixed_bytes(self) -> float:
        return sum(line.bytes for line in self.lines)

    @property
    def batch_size(self) -> int | None:
        """In the share that is memory_utilization."""
        chosen = self.settings.train.memory_utilization
        return next(share.batch_size for share in self.shares if share.share == chosen)

    def totals(self) -> dict[int, int]:
        """Samples an optimizer step by number of cards; {} where a card's batch is not known."""
        size, passes = self.batch_size, self.settings.accumulate
        counts = sorted({*NUM_CARDS, self.settings.gpus})
        return {} if size is None else {count: count * size * passes for count in counts}


def calculate(settings: Calculator, card: Card) -> Calculation:
    """All figures for a card. ValueError for what a user can mend."""
    frozen, overhead = _frozen(settings), _overhead(settings, card)
    _check_fixed(settings, card, [*frozen, overhead])  # before anything slow starts
    model = None
    if settings.trainable is None:
        model = _Model(settings, card, beside_bytes=sum(line.bytes for line in [*frozen, overhead]))
        lines = [*frozen, *model.lines(), overhead]
    else:
        lines = [*frozen, *_trained(settings, settings.trainable), overhead]
    _check_fixed(settings, card, lines)
    fixed_bytes, shares = sum(line.bytes for line in lines), []
    for share in sorted({*SHARES, settings.train.memory_utilization}):
        usable_bytes = share * card.usable_bytes
        row = Share(share, usable_bytes, usable_bytes - fixed_bytes, None)
        if model is not None:
            row = replace(row, **model.largest(usable_bytes))
        elif settings.sample_memory is not None:
            most = int(row.left_bytes / _sample_bytes(settings.sample_memory))
            row = replace(row, batch_size=max(0, min(settings.train.max_batch_size, most)))
        shares.append(row)
    return Calculation(settings, card, lines, shares, model.work if model is not None else None)


class _Model:
    """What batches of any size hold on a card, beside so many bytes of other models and overhead."""

    def __init__(self, settings: Calculator, card: Card, *, beside_bytes: float) -> None:
        train = settings.train
        precision = train.precision if train.precision != "auto" else "bf16" if card.bf16 else "fp32"
        group = replace(train, precision=precision, batch_size=train.group_size)  # all of a batch at once
        work = workload(group, torch.device("cuda"), absent=settings.gpu or settings.gpu_memory)
        if settings.prompt_tokens is not None:
            work = replace(work, longest_prompt=settings.prompt_tokens)
        self.work, self._most = work, train.max_batch_size
        self._traced = TracedPhases(work.phase_settings())
        self._resident = work.resident(
            self._traced.num_parameters, self._traced.trained_sizes, self._traced.frozen_bytes
        )
        self._held_bytes = beside_bytes + sum(self._resident.values())

    def lines(self) -> list[Line]:
        """Of the optimizer's step, when weights, moments and gradients are all there."""
        trained, lora = sum(self._traced.trained_sizes), self.work.config.lora
        gradients = self.work.target.exact_dtype.itemsize * trained
        names = {"reference": "frozen reference", "weights": "trainable weights"}
        if lora.on:
            names["weights"] = f"frozen base{' in 4 bits' * lora.load_in_4bit} and adapters"
        lines = []
        for part, size in {**self._resident, "gradients": gradients}.items():
            detail = f"{size / trained:.3g} bytes a {'trained ' if lora.on else ''}parameter"
            if lora.on and part == "weights":
                detail = f"the reference, too; {trained / 1e6:.3g} million are trained"
            lines.append(Line(names.get(part, part), size, detail))
        return sorted(lines, key=lambda line: line.name != names["reference"])

    def largest(self, usable_bytes: float) -> dict[str, Any]:
        """The largest batch whose every phase fits all at once, the fullest phase and its peak."""
        group, total = self.work.config.group_size, max(0, int(usable_bytes))
        card = TracedCard(DeviceMemory(total, total, 0), utilization=1.0)
        card.held_bytes = int(self._held_bytes)
        fit = Fit(card, group_size=group)
        all_of_it = self.work.with_settings(batch_size=self._most // group * group)
        warm_up(fit, all_of_it, partial(see_trace, fit, self._traced), bold=True)
        try:
            size = largest_batch(fit, all_of_it)
        except SettingsError:  # not one group
            return {"batch_size": 0}
        phases = self.work.phase_settings().phases
        added = {phase: self._traced.added_bytes(phase, self.work.size(size)) for phase in phases}
        fullest = max(phases, key=lambda phase: added[phase])
        return {"batch_size": size, "fullest": fullest, "peak_bytes": self._held_bytes + added[fullest]}


def _frozen(settings: Calculator) -> list[Line]:
    """One line for the models that only stand beside, if there are any."""
    if not settings.frozen:
        return []
    size, names = FROZEN_BYTES[settings.frozen_dtype], " + ".join(f"{n / 1e9:g}" for n in settings.frozen)
    detail = f"{size:g} bytes a parameter ({settings.frozen_dtype})"
    return [Line(f"frozen, {names} B", size * sum(settings.frozen), detail)]


def _trained(settings: Calculator, count: float) -> list[Line]:
    """Weights, optimizer and gradients of so many trained parameters."""
    weights, optimizer = settings.weights or "bf16+master", settings.optimizer or "adamw"
    weight, master, moments = WEIGHT_BYTES[weights], MASTER_BYTES[weights], MOMENT_BYTES[optimizer]
    dtype = f"{weight} bytes a parameter ({weights.partition('+')[0]})"
    parts = f"{optimizer}: {moments}" + (f", and a master copy in fp32: {master}" if master else "")
    return [
        Line(f"trainable, {count / 1e9:g} B", weight * count, dtype),
        Line("optimizer", (master + moments) * count, f"{master + moments} bytes a parameter ({parts})"),
        Line("gradients", weight * count, dtype),
    ]


def _overhead(settings: Calculator, card: Card) -> Line:
    share = settings.overhead_share
    if share is None:
        if settings.trainable is None:
            return Line("overhead", CONTEXT_BYTES, "CUDA context and cuBLAS's workspace")
        share = OVERHEAD_SHARE
    return Line("overhead", share * card.usable_bytes, f"{100 * share:g} % of the card", share)


def _check_fixed(settings: Calculator, card: Card, lines: Sequence[Line]) -> None:
    """SettingsError where the lines alone are more than the card."""
    held_bytes = sum(line.bytes for line in lines)
    if held_bytes < card.usable_bytes:
        return
    what = f"model is {settings.train.model}"
    if settings.frozen:
        counts = " and ".join(f"{count / 1e9:g} B" for count in settings.frozen)
        what = f"frozen is {counts} in {settings.frozen_dtype}"
    elif settings.trainable is not None:
        what = f"trainable is {settings.trainable / 1e9:g} B"
    raise SettingsError(
        f"{what}: {', '.join(f'{line.name}: {readable(line.bytes)}' for line in lines)}; that is "
        f"{readable(held_bytes)} before any sample, and {card.name} offers {readable(card.usable_bytes)}: "
        f"give {'fewer or smaller ones' if settings.frozen else 'a smaller one'}, or a larger card."
    )


def _sample_bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise SettingsError(f"sample_memory is {error}") from error


# ---------------------------------------------------------------------------------------- for people


def what_is_planned(found: Calculation) -> str:
    """The model, and what it is planned for; empty with counts alone."""
    if found.work is None:
        return ""
    config = found.work.config
    tokens = f"{found.work.longest_prompt} + {config.sampling.max_new_tokens} tokens"
    parts = [config.model, _dtype(found.work), tokens, f"groups of {config.group_size}"]
    if config.gradient_checkpointing not in ("auto", "none"):
        parts.append(f"{config.gradient_checkpointing} gradient checkpointing")
    return ", ".join(parts)


def _dtype(work: Workload) -> str:
    return str(work.target.dtype).removeprefix("torch.")


def budget_rows(found: Calculation) -> list[Row]:
    """Line by line, from the card down to what remains.

    With counts alone there is a second column that counts as published budgets do: 10**9 bytes, and the
    card as it is sold.
    """
    usable, nominal = found.card.usable_bytes, NOMINAL_GB * found.card.sold_gb
    rows: list[Row] = []

    def row(name: str, size: float, published: float, how: str) -> None:
        known = f"{published / NOMINAL_GB:.2f}" if found.work is None else None
        rows.append({"line": name, "GB": _gb(size), "10**9 bytes": known, "how": how})

    row("card", usable, nominal, f"sold with {found.card.sold_gb:g}; what CUDA offers")
    left = nominal
    for line in found.lines:
        published = line.bytes if line.share is None else line.share * nominal
        left -= published
        row(line.name, line.bytes, published, line.detail)
    row("remains", usable - found.fixed_bytes, left, "for activations, logits, keys and values")
    return rows


def share_rows(found: Calculation) -> list[Row]:
    """A share of the card: what is left for samples and the largest batch; totals on more cards."""
    passes, rows = found.settings.accumulate, list[Row]()
    counts = [count for count in found.totals() if count * passes > 1]
    for share in found.shares:
        size = share.batch_size
        row: dict[str, object] = {
            "share": f"{100 * share.share:g}%", "GB": f"{share.usable_bytes / GB:.2f}",
            "for samples": f"{share.left_bytes / GB:.2f}", "batch": "none fits" if size == 0 else size,
            "fullest in": share.fullest, "peak": _gb(share.peak_bytes) if share.peak_bytes else None,
        }  # fmt: skip
        for count in counts:
            name = f"{count} card{'s' * (count > 1)}" + (f" × {passes}" if passes > 1 else "")
            row[name] = count * passes * (size or 0)
        rows.append(row)
    return rows


def _gb(size: float) -> str:
    """Hundredths of a GB; thousandths where those would say little."""
    return f"{size / GB:.3f}" if abs(size) < GB / 10 else f"{size / GB:.2f}"


def notes(found: Calculation) -> list[str]:
    """How far to trust it, and what does not follow."""
    settings, size = found.settings, found.batch_size
    if found.work is None:
        if size is not None:
            return ["A sample's bytes are as given: their error is not known."]
        return [
            "Counts do not tell what a sample takes, so no batch follows: give --sample-memory 450MB, or a "
            "--model instead of counts."
        ]
    told = [
        "Tensors are traced, not measured on this card; what its allocator and kernels take besides is what "
        "a share below 100% leaves room for."
    ]
    if size and size + settings.train.group_size > settings.train.max_batch_size:
        told.append("No larger batch was looked for: --max-batch-size.")
    if not found.card.bf16 and settings.train.precision in ("auto", "bf16"):
        falls = "it is emulated, and slow" if found.work.target.is_lower else "this is for fp32"
        told.append(f"{found.card.name} has no native bf16: {falls}.")
    return told


def as_json(found: Calculation) -> dict[str, Any]:
    """All figures; bytes are bytes."""
    card, work = found.card, found.work
    return {
        "card": {"name": card.name, "sold_gb": card.sold_gb, "usable_bytes": card.usable_bytes},
        "model": work and work.config.model, "precision": work and _dtype(work),
        "lines": [asdict(line) for line in found.lines], "fixed_bytes": found.fixed_bytes,
        "remaining_bytes": card.usable_bytes - found.fixed_bytes,
        "shares": [asdict(share) for share in found.shares], "totals": found.totals(), "notes": notes(found),
    }  # fmt: skip


def write_profiles(found: Calculation, file: Path) -> list[str]:
    """Write a profile for each number of cards, and return their names. SettingsError without a batch.

    A profile's batch size is what an optimizer step sees on all its cards together; how many rows of it go
    through at once, the trainer plans by itself.
    """
    train, card = found.settings.train, found.card.name
    group, passes = train.group_size, found.settings.accumulate
    size = (found.batch_size or 0) // group * group
    if not size:
        raise SettingsError(
            f"yaml is {file}, but no batch of whole groups of {group} is known to fit "
            f"{train.memory_utilization:.0%} of {card}: give a larger card, shorter texts, or what "
            "a sample takes."
        )
    defaults, always = to_flat(ON_A_CARD), {"group_size", "max_new_tokens", "memory_utilization"}
    shared = {
        name: value
        for name, value in to_flat(train).items()
        if (value != defaults[name] or name in always) and name not in ("batch_size", "max_batch_size")
    }
    lines = [f"# Calculated for {card}, not measured on it: {size} samples at once at most on each card."]
    if found.work is not None:
        shared |= {"model": found.work.config.model, "precision": found.work.config.precision}
    else:
        lines.append("# The model is not named here: add --model FOLDER of the one it was calculated for.")
    lines += [yaml.safe_dump(shared, sort_keys=False) + "profiles:"]
    names = {count: f"{card}_{CARD_NAMES.get(count, f'x{count}')}" for count in found.totals()}
    for count, name in names.items():
        launch = "python" if count == 1 else f"accelerate launch --num_processes {count}"
        lines += [
            f"  # {launch} train_lean.py --config {shlex.quote(file.name)} --profile {name}",
            f"  {name}:", f"    batch_size: {count * size * passes}",
        ]  # fmt: skip
    file.write_text("\n".join(lines) + "\n")
    return list(names.values())
