"""Which batch fits a card that is not there, and what holds the rest of it; no device is needed.

From a model, by the trainer's own plan on tensors without storage; or from counts of parameters alone, of any
trainer, as published budgets do: bytes a sample then come from the person, or no batch follows.
"""

import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml

from grpo.config import SettingsError, to_plain
from grpo.config.sizes import GB, parse_size
from grpo.data.reward_files import resolve_max_new_tokens
from grpo.logs.tables import Row
from grpo.memory import AbsentCard, Fit
from grpo.memory.budget import CONTEXT_BYTES, DeviceMemory, readable
from grpo.plan.trace import TracedPhases
from grpo.plan.warm_up import largest_batch, see_trace, warm_up
from grpo.run.dry_run import workload
from grpo.workbench.cards import Card
from grpo.workbench.settings import Calculator

SHARES, NUM_CARDS = (0.8, 0.85, 0.9), (1, 2, 4, 8)
"""Shares of a card, and numbers of cards, that batches are always calculated for."""
FROZEN_BYTES = {"fp32": 4, "bf16": 2, "int8": 1, "int4": 0.5}
"""Bytes of a frozen parameter; the scales of quantized ones are left out."""
MOMENT_BYTES = {"adamw": 8, "adamw-8bit": 2, "sgd": 0}
"""Bytes of the optimizer for a trained parameter: AdamW's two moments in fp32 or 8 bits, or none."""
WEIGHT_BYTES = {"bf16+master": (2, 4), "fp32": (4, 0), "bf16": (2, 0)}
"""Bytes of a trained parameter, as many of its gradient; and of the fp32 copy that is kept beside bf16."""
OVERHEAD_SHARE = 0.08
"""Share of the card that is set aside for what is no tensor in a budget from counts, as published ones do."""
NOMINAL_GB = 10**9
CARD_NAMES = {1: "single", 2: "dual", 4: "quad", 8: "octo"}


def calculate(settings: Calculator, card: Card) -> Row:
    """All figures for a card, as JSON has them; bytes are bytes.

    A batch size is None where nobody knows what a sample takes, 0 where none fits. ValueError for what a user
    can mend.
    """
    *frozen, overhead = _beside(settings, card)
    beside_bytes = _check_fixed(settings, card, [*frozen, overhead])  # before anything slow starts
    model = Model(settings, card) if settings.trainable is None else None
    lines = [*frozen, *(_lines_of_model(model) if model else _lines_of_counts(settings)), overhead]
    fixed_bytes = _check_fixed(settings, card, lines)
    shares = list[Row]()
    for share in sorted({*SHARES, settings.memory_utilization}):
        usable_bytes = share * card.usable_bytes
        row: Row = {"share": share, "usable_bytes": usable_bytes, "left_bytes": usable_bytes - fixed_bytes}
        row["batch_size"] = None
        if model is not None:
            row |= model.largest(usable_bytes, beside_bytes)
        elif settings.sample_memory is not None:
            most = int(row["left_bytes"] / parse_size(settings.sample_memory))
            row["batch_size"] = max(0, min(settings.max_batch_size, most))
        shares.append(row)
    size = next(row["batch_size"] for row in shares if row["share"] == settings.memory_utilization)
    counts = sorted({*NUM_CARDS, settings.gpus}) if size is not None else []
    return {
        "card": {"name": card.name, "sold_gb": card.sold_gb, "usable_bytes": card.usable_bytes},
        "model": model and model.work.config.model,
        "precision": model and model.work.config.precision,
        "planned": model and model.planned(),
        "lines": lines,
        "fixed_bytes": fixed_bytes,
        "remaining_bytes": card.usable_bytes - fixed_bytes,
        "shares": shares,
        "batch_size": size,
        "totals": {count: count * size * settings.accumulate for count in counts},
        "notes": _notes(settings, card, model, size),
    }


# ----------------------------------------------------------------------------- lines of the budget


def _line(name: str, size: float, detail: str) -> Row:
    return {"name": name, "bytes": size, "detail": detail}


def _beside(settings: Calculator, card: Card) -> list[Row]:
    """Lines of the frozen models, if there are any, and as the last one the overhead."""
    lines, share = [], settings.overhead_share
    if settings.frozen:
        size, names = FROZEN_BYTES[settings.frozen_dtype], " + ".join(f"{n / 1e9:g}" for n in settings.frozen)
        detail = f"{size:g} bytes a parameter ({settings.frozen_dtype})"
        lines = [_line(f"frozen, {names} B", size * sum(settings.frozen), detail)]
    if share is None and settings.trainable is None:
        return [*lines, _line("overhead", CONTEXT_BYTES, "CUDA context and cuBLAS's workspace")]
    share = OVERHEAD_SHARE if share is None else share
    overhead = _line("overhead", share * card.usable_bytes, f"{100 * share:g} % of the card")
    return [*lines, {**overhead, "share": share}]


def _lines_of_counts(settings: Calculator) -> list[Row]:
    """Weights, optimizer and gradients of the trained parameters."""
    count, weights = settings.trainable or 0.0, settings.weights or "bf16+master"
    optimizer = settings.optimizer or "adamw"
    (weight, master), moments = WEIGHT_BYTES[weights], MOMENT_BYTES[optimizer]
    dtype, copy = weights.partition("+")[0], f", and a master copy in fp32: {master}" if master else ""
    return [
        _line(f"trainable, {count / 1e9:g} B", weight * count, f"{weight} bytes a parameter ({dtype})"),
        _line(
            "optimizer",
            (master + moments) * count,
            f"{master + moments} bytes a parameter ({optimizer}: {moments}{copy})",
        ),
        _line("gradients", weight * count, f"{weight} bytes a parameter ({dtype})"),
    ]


def _lines_of_model(model: "Model") -> list[Row]:
    """Returns lines of memory during the optimizer's step, when weights, moments and gradients are all
    there."""
    trained, config = sum(model.traced.phases.trained_sizes), model.work.config
    sizes = {**model.resident, "gradients": model.work.target.master_dtype.itemsize * trained}
    names, of_what = {"reference": "frozen reference", "weights": "trainable weights"}, "parameter"
    if config.uses_lora:
        names["weights"] = f"frozen base{' in 4 bits' * config.load_in_4bit} and adapters"
        of_what = "trained parameter"
    lines = {
        part: _line(names.get(part, part), size, f"{size / trained:.3g} bytes a {of_what}")
        for part, size in sizes.items()
    }
    if config.uses_lora:
        lines["weights"]["detail"] = f"the reference, too; {trained / 1e6:.3g} million are trained"
    return sorted(lines.values(), key=lambda line: line["name"] != "frozen reference")


def _check_fixed(settings: Calculator, card: Card, lines: Sequence[Row]) -> float:
    """The bytes of all lines. SettingsError if they exceed the card before there is any sample."""
    size: float = sum(line["bytes"] for line in lines)
    if size < card.usable_bytes:
        return size
    parts = ", ".join(f"{line['name']}: {readable(line['bytes'])}" for line in lines)
    smaller = "fewer or smaller models" if settings.frozen else "a smaller model"
    raise SettingsError(
        f"{parts}; that is {readable(size)} before any sample, and {card.name} offers "
        f"{readable(card.usable_bytes)}: give {smaller}, or a larger card."
    )


class Model:
    """A model on a card: the memory that it takes by itself, and the largest batch beside it."""

    def __init__(self, settings: Calculator, card: Card) -> None:
        train, precision = settings.train, settings.precision
        if precision == "auto":
            precision = "bf16" if card.bf16 else "fp16"
        train = replace(train, precision=precision, batch_size=train.group_size)  # all of a batch at once
        work = workload(train, torch.device("cuda"), absent=settings.gpu or settings.gpu_memory)
        if settings.prompt_tokens is not None:
            work = replace(work, longest_prompt=settings.prompt_tokens)
        self.work, self.traced = work, TracedPhases(work)
        self.resident = self.traced.phases.resident()

    def planned(self) -> str:
        """Model, dtype, lengths and group size that the plan is for, in one line."""
        config, dtype = self.work.config, str(self.work.target.dtype).removeprefix("torch.")
        tokens = f"{self.work.longest_prompt} + {config.max_new_tokens} tokens"
        words = f"{config.model}, {dtype}, {tokens}, groups of {config.group_size}"
        if config.gradient_checkpointing in ("auto", "none"):
            return words
        return f"{words}, {config.gradient_checkpointing} gradient checkpointing"

    def largest(self, usable_bytes: float, beside_bytes: float) -> dict[str, Any]:
        """The largest batch whose every phase fits all at once, the fullest phase and its peak."""
        config, total = self.work.config, max(0, int(usable_bytes))
        held_bytes = beside_bytes + sum(self.resident.values())
        card = AbsentCard(DeviceMemory(total, total, 0), utilization=1.0)
        card.held_bytes = int(held_bytes)
        fit = Fit(card, group_size=config.group_size)
        most = config.max_batch_size // config.group_size * config.group_size
        all_of_it = self.work.with_settings(batch_size=most)
        warm_up(fit, all_of_it, partial(see_trace, fit, self.traced), traced_only=True)
        try:
            size = largest_batch(fit, all_of_it)
        except SettingsError:  # not one group
            return {"batch_size": 0, "fullest": None, "peak_bytes": None}
        added = {phase: self.traced.added_bytes(phase, self.work.size(size)) for phase in self.work.phases}
        fullest = max(added, key=lambda phase: added[phase])
        return {"batch_size": size, "fullest": fullest, "peak_bytes": held_bytes + added[fullest]}


def _notes(settings: Calculator, card: Card, model: Model | None, size: int | None) -> list[str]:
    """Remarks on how far to trust the figures, and on what cannot be concluded."""
    if model is None and size is not None:
        return ["A sample's bytes are as given: their error is not known."]
    if model is None:
        return [
            "Counts do not tell what a sample takes, so no batch follows: give --sample-memory 450MB, or a "
            "--model instead of counts."
        ]
    notes = [
        "Tensors are traced, not measured on this card; what its allocator and kernels take besides is what "
        "a share below 100% leaves room for."
    ]
    if size and size + settings.group_size > settings.max_batch_size:
        notes.append("No larger batch was looked for: --max-batch-size.")
    if not card.bf16 and settings.precision in ("auto", "bf16"):
        falls = "it is emulated, and slow" if settings.precision == "bf16" else "this is for fp16"
        notes.append(f"{card.name} has no native bf16: {falls}.")
    return notes


# ---------------------------------------------------------------------------------------- for people


def budget_rows(figures: Row) -> list[Row]:
    """The budget line by line, from the card down to what remains.

    With counts alone there is a second column that counts as published budgets do: 10**9 bytes, and the
    card as it is sold.
    """
    card, nominal = figures["card"], NOMINAL_GB * figures["card"]["sold_gb"]
    rows, left = list[Row](), nominal

    def add(name: str, size: float, published: float, how: str) -> None:
        in_public = f"{published / NOMINAL_GB:.2f}" if figures["model"] is None else None
        rows.append({"line": name, "GB": _gb(size), "10**9 bytes": in_public, "how": how})

    add("card", card["usable_bytes"], nominal, f"sold with {card['sold_gb']:g}; what CUDA offers")
    for line in figures["lines"]:
        published = line["share"] * nominal if "share" in line else line["bytes"]
        left -= published
        add(line["name"], line["bytes"], published, line["detail"])
    add("remains", figures["remaining_bytes"], left, "for activations, logits, keys and values")
    return rows


def share_rows(figures: Row, passes: int) -> list[Row]:
    """For each share of the card: the room left for samples, the largest batch, and totals on more cards."""
    rows, times = list[Row](), f" × {passes}" if passes > 1 else ""
    for share in figures["shares"]:
        size, peak = share["batch_size"], share.get("peak_bytes")
        rows.append(
            {
                "share": f"{100 * share['share']:g}%",
                "GB": f"{share['usable_bytes'] / GB:.2f}",
                "for samples": f"{share['left_bytes'] / GB:.2f}",
                "batch": "none fits" if size == 0 else size,
                "fullest in": share.get("fullest"),
                "peak": _gb(peak) if peak else None,
                **{
                    f"{n} card{'s' * (n > 1)}{times}": n * passes * size
                    for n in figures["totals"]
                    if n * passes > 1
                },
            }
        )
    return rows


def _gb(size: float) -> str:
    """GB with two decimals, or three where that would say little."""
    return f"{size / GB:.3f}" if abs(size) < GB / 10 else f"{size / GB:.2f}"


def write_profiles(settings: Calculator, figures: Row, file: Path) -> list[str]:
    """Write a profile for each number of cards, and return their names. SettingsError without a batch.

    A profile's batch size is what an optimizer step sees on all its cards together; how many rows of it go
    through at once, the trainer plans by itself.
    """
    card, group = figures["card"]["name"], settings.group_size
    size = (figures["batch_size"] or 0) // group * group
    if not size:
        raise SettingsError(
            f"yaml is {file}, but no batch of whole groups of {group} is known to fit "
            f"{settings.memory_utilization:.0%} of {card}: give a larger card, shorter texts, or what "
            "a sample takes."
        )
    defaults, always = to_plain(Calculator().train), {"group_size", "max_new_tokens", "memory_utilization"}
    content = {
        name: value
        for name, value in to_plain(resolve_max_new_tokens(settings.train)).items()
        if name in always or (value != defaults[name] and "batch_size" not in name)
    }
    remarks = [f"# Calculated for {card}, not measured on it: {size} samples at once at most on each card."]
    if figures["model"] is not None:
        content |= {"model": figures["model"], "precision": figures["precision"]}
    else:
        remarks.append("# The model is not named here: add --model FOLDER of the one it was calculated for.")
    content["profiles"] = profiles = {}
    for count in figures["totals"]:
        name = f"{card}_{CARD_NAMES.get(count, f'x{count}')}"
        profiles[name] = {"batch_size": count * size * settings.accumulate}
        launch = "python" if count == 1 else f"accelerate launch --num_processes {count}"
        remarks.append(f"# {launch} train_lean.py --config {shlex.quote(file.name)} --profile {name}")
    file.write_text("\n".join([*remarks, yaml.safe_dump(content, sort_keys=False)]), encoding="utf-8")
    return list(profiles)
