"""Which batch fits a card that is not there, and what holds the rest of it; no device is needed.

From a model, by the trainer's own plan on tensors without storage; or from counts of parameters alone, of any
trainer, as published budgets do: bytes a sample then come from the person, or no batch follows.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo.config import SettingsError, to_plain
from grpo.config.sizes import GB, parse_size
from grpo.memory import Card as TracedCard
from grpo.memory import Fit
from grpo.memory.budget import CONTEXT_BYTES, DeviceMemory, readable
from grpo.plan.trace import TracedPhases
from grpo.plan.warm_up import largest_batch, see_trace, warm_up
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
WEIGHT_BYTES: dict[Weights, tuple[int, int]] = {"bf16+master": (2, 4), "fp32": (4, 0), "bf16": (2, 0)}
"""Of a trained parameter and of its gradient; of the fp32 copy that the optimizer keeps beside bf16."""
OVERHEAD_SHARE = 0.08
"""Of the card, for what is no tensor; with counts alone, as published budgets have it."""
NOMINAL_GB = 10**9
CARD_NAMES = {1: "single", 2: "dual", 4: "quad", 8: "octo"}

Line = Row
"""Of the budget: its name, bytes and detail, and the share of the card that it is, if it is one."""
Figures = Row
"""All that was calculated, as JSON has it; bytes are bytes."""


def calculate(settings: Calculator, card: Card) -> Figures:
    """All figures for a card. A batch size is None where nobody knows what a sample takes, 0 where none fits.

    ValueError for what a user can mend.
    """
    frozen, overhead = _frozen(settings), _overhead(settings, card)
    _check_fixed(settings, card, [*frozen, overhead])  # before anything slow starts
    model = None
    if settings.trainable is None:
        model = Model(settings, card, beside_bytes=_sum([*frozen, overhead]))
    needed = _trained(settings, settings.trainable or 0) if model is None else model.lines()
    lines = [*frozen, *needed, overhead]
    _check_fixed(settings, card, lines)
    fixed_bytes, shares = _sum(lines), []
    for share in sorted({*SHARES, settings.train.memory_utilization}):
        usable_bytes = share * card.usable_bytes
        left_bytes = usable_bytes - fixed_bytes
        row: Row = {"share": share, "usable_bytes": usable_bytes, "left_bytes": left_bytes}
        row["batch_size"] = None
        if model is not None:
            row |= model.largest(usable_bytes)
        elif settings.sample_memory is not None:
            most = int(left_bytes / _sample_bytes(settings.sample_memory))
            row["batch_size"] = max(0, min(settings.train.max_batch_size, most))
        shares.append(row)
    size = next(row["batch_size"] for row in shares if row["share"] == settings.train.memory_utilization)
    counts = sorted({*NUM_CARDS, settings.gpus}) if size is not None else []
    return {
        "card": {"name": card.name, "sold_gb": card.sold_gb, "usable_bytes": card.usable_bytes},
        "model": model and model.work.config.model, "precision": model and model.work.config.precision,
        "planned": model and model.planned(), "lines": lines, "fixed_bytes": fixed_bytes,
        "remaining_bytes": card.usable_bytes - fixed_bytes, "shares": shares, "batch_size": size,
        "totals": {count: count * size * settings.accumulate for count in counts},
        "notes": notes(settings, card, model, size),
    }  # fmt: skip


def _sum(lines: Sequence[Line]) -> float:
    return sum(line["bytes"] for line in lines)


class Model:
    """What batches of any size hold on a card, beside so many bytes of other models and overhead."""

    def __init__(self, settings: Calculator, card: Card, *, beside_bytes: float) -> None:
        train = settings.train
        precision = train.precision if train.precision != "auto" else "bf16" if card.bf16 else "fp32"
        group = replace(train, precision=precision, batch_size=train.group_size)  # all of a batch at once
        work = workload(group, torch.device("cuda"), absent=settings.gpu or settings.gpu_memory)
        if settings.prompt_tokens is not None:
            work = replace(work, longest_prompt=settings.prompt_tokens)
        self.work, self._most = work, train.max_batch_size
        self._traced = TracedPhases(work)
        self._resident = self._traced.phases.resident()
        self._held_bytes = beside_bytes + sum(self._resident.values())

    def planned(self) -> str:
        """What is planned for, in a line."""
        config, dtype = self.work.config, str(self.work.target.dtype).removeprefix("torch.")
        tokens = f"{self.work.longest_prompt} + {config.max_new_tokens} tokens"
        parts = [config.model, dtype, tokens, f"groups of {config.group_size}"]
        if config.gradient_checkpointing not in ("auto", "none"):
            parts.append(f"{config.gradient_checkpointing} gradient checkpointing")
        return ", ".join(parts)

    def lines(self) -> list[Line]:
        """Of the optimizer's step, when weights, moments and gradients are all there."""
        trained, config = sum(self._traced.phases.trained_sizes), self.work.config
        gradients = self.work.target.exact_dtype.itemsize * trained
        names = {"reference": "frozen reference", "weights": "trainable weights"}
        if config.uses_lora:
            names["weights"] = f"frozen base{' in 4 bits' * config.load_in_4bit} and adapters"
        lines = []
        for part, size in {**self._resident, "gradients": gradients}.items():
            detail = f"{size / trained:.3g} bytes a {'trained ' if config.uses_lora else ''}parameter"
            if config.uses_lora and part == "weights":
                detail = f"the reference, too; {trained / 1e6:.3g} million are trained"
            lines.append({"name": names.get(part, part), "bytes": size, "detail": detail})
        return sorted(lines, key=lambda line: line["name"] != names["reference"])

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
            return {"batch_size": 0, "fullest": None, "peak_bytes": None}
        added = {phase: self._traced.added_bytes(phase, self.work.size(size)) for phase in self.work.phases}
        fullest = max(added, key=lambda phase: added[phase])
        return {"batch_size": size, "fullest": fullest, "peak_bytes": self._held_bytes + added[fullest]}


def _frozen(settings: Calculator) -> list[Line]:
    """One line for the models that only stand beside, if there are any."""
    if not settings.frozen:
        return []
    size, names = FROZEN_BYTES[settings.frozen_dtype], " + ".join(f"{n / 1e9:g}" for n in settings.frozen)
    detail = f"{size:g} bytes a parameter ({settings.frozen_dtype})"
    return [{"name": f"frozen, {names} B", "bytes": size * sum(settings.frozen), "detail": detail}]


def _trained(settings: Calculator, count: float) -> list[Line]:
    """Weights, optimizer and gradients of so many trained parameters."""
    weights, optimizer = settings.weights or "bf16+master", settings.optimizer or "adamw"
    (weight, master), moments = WEIGHT_BYTES[weights], MOMENT_BYTES[optimizer]
    dtype = weights.partition("+")[0]
    parts = f"{optimizer}: {moments}" + (f", and a master copy in fp32: {master}" if master else "")
    sizes = ((f"trainable, {count / 1e9:g} B", weight, dtype), ("optimizer", master + moments, parts),
             ("gradients", weight, dtype))  # fmt: skip
    return [
        {"name": name, "bytes": size * count, "detail": f"{size} bytes a parameter ({how})"}
        for name, size, how in sizes
    ]


def _overhead(settings: Calculator, card: Card) -> Line:
    share = settings.overhead_share
    if share is None and settings.trainable is None:
        return {"name": "overhead", "bytes": CONTEXT_BYTES, "detail": "CUDA context and cuBLAS's workspace"}
    share = OVERHEAD_SHARE if share is None else share
    detail = f"{100 * share:g} % of the card"
    return {"name": "overhead", "bytes": share * card.usable_bytes, "detail": detail, "share": share}


def _check_fixed(settings: Calculator, card: Card, lines: Sequence[Line]) -> None:
    """SettingsError where the lines alone are more than the card."""
    if _sum(lines) < card.usable_bytes:
        return
    what = f"model is {settings.train.model}"
    if settings.frozen:
        counts = " and ".join(f"{count / 1e9:g} B" for count in settings.frozen)
        what = f"frozen is {counts} in {settings.frozen_dtype}"
    elif settings.trainable is not None:
        what = f"trainable is {settings.trainable / 1e9:g} B"
    parts = ", ".join(f"{line['name']}: {readable(line['bytes'])}" for line in lines)
    raise SettingsError(
        f"{what}: {parts}; that is "
        f"{readable(_sum(lines))} before any sample, and {card.name} offers {readable(card.usable_bytes)}: "
        f"give {'fewer or smaller ones' if settings.frozen else 'a smaller one'}, or a larger card."
    )


def _sample_bytes(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise SettingsError(f"sample_memory is {error}") from error


def notes(settings: Calculator, card: Card, model: Model | None, size: int | None) -> list[str]:
    """How far to trust it, and what does not follow."""
    if model is None and size is not None:
        return ["A sample's bytes are as given: their error is not known."]
    if model is None:
        return [
            "Counts do not tell what a sample takes, so no batch follows: give --sample-memory 450MB, or a "
            "--model instead of counts."
        ]
    words = [
        "Tensors are traced, not measured on this card; what its allocator and kernels take besides is what "
        "a share below 100% leaves room for."
    ]
    if size and size + settings.train.group_size > settings.train.max_batch_size:
        words.append("No larger batch was looked for: --max-batch-size.")
    if not card.bf16 and settings.train.precision in ("auto", "bf16"):
        falls = "it is emulated, and slow" if model.work.target.is_lower else "this is for fp32"
        words.append(f"{card.name} has no native bf16: {falls}.")
    return words


# ---------------------------------------------------------------------------------------- for people


def budget_rows(figures: Figures) -> list[Row]:
    """Line by line, from the card down to what remains.

    With counts alone there is a second column that counts as published budgets do: 10**9 bytes, and the
    card as it is sold.
    """
    card, rows = figures["card"], list[Row]()
    left = nominal = NOMINAL_GB * card["sold_gb"]

    def row(name: str, size: float, published: float, how: str) -> None:
        known = f"{published / NOMINAL_GB:.2f}" if figures["model"] is None else None
        rows.append({"line": name, "GB": _gb(size), "10**9 bytes": known, "how": how})

    row("card", card["usable_bytes"], nominal, f"sold with {card['sold_gb']:g}; what CUDA offers")
    for line in figures["lines"]:
        published = line["share"] * nominal if "share" in line else line["bytes"]
        left -= published
        row(line["name"], line["bytes"], published, line["detail"])
    row("remains", figures["remaining_bytes"], left, "for activations, logits, keys and values")
    return rows


def share_rows(figures: Figures, passes: int) -> list[Row]:
    """A share of the card: what is left for samples and the largest batch; totals on more cards."""
    rows, counts = list[Row](), [count for count in figures["totals"] if count * passes > 1]
    for share in figures["shares"]:
        size, peak = share["batch_size"], share.get("peak_bytes")
        row = {
            "share": f"{100 * share['share']:g}%", "GB": f"{share['usable_bytes'] / GB:.2f}",
            "for samples": f"{share['left_bytes'] / GB:.2f}", "batch": "none fits" if size == 0 else size,
            "fullest in": share.get("fullest"), "peak": _gb(peak) if peak else None,
        }  # fmt: skip
        times = f" × {passes}" if passes > 1 else ""
        row |= {f"{n} card{'s' * (n > 1)}{times}": n * passes * size for n in counts}
        rows.append(row)
    return rows


def _gb(size: float) -> str:
    """Hundredths of a GB; thousandths where those would say little."""
    return f"{size / GB:.3f}" if abs(size) < GB / 10 else f"{size / GB:.2f}"


def write_profiles(settings: Calculator, figures: Figures, file: Path) -> list[str]:
    """Write a profile for each number of cards, and return their names. SettingsError without a batch.

    A profile's batch size is what an optimizer step sees on all its cards together; how many rows of it go
    through at once, the trainer plans by itself.
    """
    train, card = settings.train, figures["card"]["name"]
    group = train.group_size
    size = (figures["batch_size"] or 0) // group * group
    if not size:
        raise SettingsError(
            f"yaml is {file}, but no batch of whole groups of {group} is known to fit "
            f"{train.memory_utilization:.0%} of {card}: give a larger card, shorter texts, or what "
            "a sample takes."
        )
    defaults, always = to_plain(ON_A_CARD), {"group_size", "max_new_tokens", "memory_utilization"}
    shared = {name: value for name, value in to_plain(train).items()
              if name in always or (value != defaults[name] and "batch_size" not in name)}  # fmt: skip
    remarks = [f"# Calculated for {card}, not measured on it: {size} samples at once at most on each card."]
    if figures["model"] is not None:
        shared |= {"model": figures["model"], "precision": figures["precision"]}
    else:
        remarks.append("# The model is not named here: add --model FOLDER of the one it was calculated for.")
    profiles: dict[str, Mapping[str, int]] = {}
    for count in figures["totals"]:
        name = f"{card}_{CARD_NAMES.get(count, f'x{count}')}"
        profiles[name] = {"batch_size": count * size * settings.accumulate}
        launch = "python" if count == 1 else f"accelerate launch --num_processes {count}"
        remarks.append(f"# {launch} train_lean.py --config {shlex.quote(file.name)} --profile {name}")
    content = yaml.safe_dump({**shared, "profiles": profiles}, sort_keys=False)
    file.write_text("\n".join([*remarks, content]))
    return list(profiles)
