"""Which batch fits a card that is not there, and what holds the rest of it; no device is needed.

From a model, by the trainer's own plan on tensors without storage; or from counts of parameters alone, of any
trainer, as published budgets do: bytes a sample then come from the person, or no batch follows.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
import yaml
from rich.console import Console
from rich.table import Table

from grpo.config import Config, SettingsError, to_flat
from grpo.config.limits import COUNT, Limit, check_limits
from grpo.config.sizes import GB, parse_size
from grpo.workbench.cards import Card, card_of_size, find_card
from grpo.workbench.task import parse_flags

if TYPE_CHECKING:
    from grpo.plan.workload import Workload

Weights = Literal["bf16+master", "fp32", "bf16"]
Optimizer = Literal["adamw", "adamw-8bit", "sgd"]
FrozenDtype = Literal["fp32", "bf16", "int8", "int4"]
LESS_THAN_ALL = Limit(lambda share: 0 <= share < 1, "give a share from 0 to below 1")
MOST_PARAMETERS = 1e15
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
CHOSEN = ("device", "device_memory", "dry_run", "resume", "name", "shard", "memory_limit")
"""Flags of train_lean.py that mean nothing on a card that is not there."""


@dataclass(frozen=True)
class Calculator:
    """The largest batch for a card, and its memory line by line; no device is needed.

    From a model, with the flags of train_lean.py, or with --trainable from counts of parameters alone.
    """

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
    train: Config = field(default_factory=lambda: Config(max_batch_size=65536))

    def __post_init__(self) -> None:
        check_limits(self)
        for wrong in _wrong(self):
            raise SettingsError(wrong)

    @property
    def from_counts(self) -> bool:
        return self.trainable is not None

    def card(self) -> Card | None:
        """SettingsError for one that is not known."""
        if self.gpu is not None:
            return find_card(self.gpu)
        return card_of_size(self.gpu_memory) if self.gpu_memory is not None else None


def parse_calculator(arguments: Sequence[str] | None = None) -> Calculator:
    """From the command line. SettingsError for what is wrong."""
    return parse_flags(Calculator, Config(max_batch_size=65536), chosen=CHOSEN, arguments=arguments)


def _wrong(settings: Calculator) -> Iterator[str]:
    counts = [("trainable", settings.trainable)] if settings.trainable is not None else []
    for name, count in (*counts, *(("frozen", count) for count in settings.frozen)):
        if not 1 <= count < MOST_PARAMETERS:
            yield f"{name} is {count:g}: give a number of parameters, such as 8e9."
    if settings.gpu is not None and settings.gpu_memory is not None:
        yield f"gpu is {settings.gpu!r} and gpu_memory {settings.gpu_memory!r}: give one of the two."
    for name, file in (("yaml", settings.yaml), ("json", settings.json)):
        if file is not None and not file.parent.is_dir():
            yield f"{name} is {file}: there is no folder {file.parent}, make it first."
    model = settings.train.model
    if settings.from_counts and model != "auto":
        yield f"trainable is {settings.trainable:g}, and there is a model, {model}: give one of the two."
    for name in ("weights", "optimizer", "sample_memory"):
        if (value := getattr(settings, name)) is not None and not settings.from_counts:
            yield (
                f"{name} is {value}, but a model's memory is planned: leave it out, or give counts with "
                "--trainable instead of a model."
            )
    for name, value in (
        ("prompt_tokens", settings.prompt_tokens),
        ("lora_rank", settings.train.lora.lora_rank),
    ):
        if value and settings.from_counts:
            yield f"{name} is {value}, which counts alone do not know: leave it out, or --trainable."


# ------------------------------------------------------------------------------------------- figures


@dataclass(frozen=True)
class Line:
    """One line of the budget in bytes. `share` of the card, where it is one."""

    name: str
    bytes: float
    detail: str
    share: float | None = None


@dataclass(frozen=True)
class Row:
    """A share of the card: what is left for samples there, the largest batch, and which phase is fullest."""

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
    lines: tuple[Line, ...]
    rows: tuple[Row, ...]
    work: "Workload | None" = None

    @property
    def fixed_bytes(self) -> float:
        return sum(line.bytes for line in self.lines)

    @property
    def row(self) -> Row:
        """The one of memory_utilization."""
        return next(row for row in self.rows if row.share == self.settings.train.memory_utilization)

    def totals(self) -> dict[int, int]:
        """Samples an optimizer step by number of cards; {} where a card's batch is not known."""
        size = self.row.batch_size
        if size is None:
            return {}
        counts = sorted({*NUM_CARDS, self.settings.gpus})
        return {count: count * size * self.settings.accumulate for count in counts}


def calculate(settings: Calculator, card: Card) -> Calculation:
    """All figures for a card. ValueError for what a user can mend."""
    frozen, overhead = frozen_lines(settings), _overhead(settings, card)
    _check_fixed(settings, card, (*frozen, overhead))  # before anything slow starts
    shares = sorted({*SHARES, settings.train.memory_utilization})
    if settings.trainable is not None:
        lines = (*frozen, *trained_lines(settings), overhead)
        fixed, each = sum(line.bytes for line in lines), _sample_bytes(settings)
        _check_fixed(settings, card, lines)
        rows = []
        for share in shares:
            usable = share * card.usable_bytes
            most = None if each is None else min(settings.train.max_batch_size, int((usable - fixed) / each))
            rows.append(Row(share, usable, usable - fixed, most if most is None else max(0, most)))
        return Calculation(settings, card, lines, tuple(rows))
    model = _Model(settings, card, beside=sum(line.bytes for line in frozen), overhead=overhead.bytes)
    lines = (*frozen, *model.lines(), overhead)
    _check_fixed(settings, card, lines)
    rows = [
        model.row(share, share * card.usable_bytes, sum(line.bytes for line in lines)) for share in shares
    ]
    return Calculation(settings, card, lines, tuple(rows), model.work)


class _Model:
    """What batches of any size hold, on a card. Bytes: `beside`, of other models, and `overhead`."""

    def __init__(self, settings: Calculator, card: Card, *, beside: float, overhead: float) -> None:
        import torch

        from grpo.plan.trace import TracedPhases
        from grpo.run.dry_run import workload

        train = settings.train
        precision = train.precision if train.precision != "auto" else "bf16" if card.bf16 else "fp32"
        group = replace(train, precision=precision, batch_size=train.group_size)  # all of a batch at once
        work = workload(group, torch.device("cuda"), absent=settings.gpu or settings.gpu_memory)
        if settings.prompt_tokens is not None:
            work = replace(work, longest_prompt=settings.prompt_tokens)
        self.work, self._most, self._held = work, train.max_batch_size, beside + overhead
        self._traced = TracedPhases(work.phase_settings())
        self._resident = work.resident(
            self._traced.num_parameters, self._traced.trained_sizes, self._traced.frozen_bytes
        )

    def lines(self) -> list[Line]:
        """Of the optimizer's step, when weights, moments and gradients are all there."""
        trained, lora = sum(self._traced.trained_sizes), self.work.config.lora
        gradients = self.work.target.exact_dtype.itemsize * trained
        parts = {**self._resident, "gradients": gradients}
        names = {"reference": "frozen reference", "weights": "trainable weights"}
        if lora.on:
            names["weights"] = f"frozen base{' in 4 bits' * lora.load_in_4bit} and adapters"

        def detail(part: str, size: float) -> str:
            if lora.on and part == "weights":
                return f"the reference, too; {trained / 1e6:.3g} million are trained"
            return f"{size / trained:.3g} bytes a {'trained ' if lora.on else ''}parameter"

        first = sorted(parts.items(), key=lambda item: item[0] != "reference")
        return [Line(names.get(part, part), size, detail(part, size)) for part, size in first]

    def row(self, share: float, usable_bytes: float, fixed_bytes: float) -> Row:
        size = self._largest(usable_bytes)
        left = usable_bytes - fixed_bytes
        if not size:
            return Row(share, usable_bytes, left, 0)
        added = {phase: self._traced.added_bytes(phase, self.work.size(size)) for phase in self._phases}
        fullest = max(added, key=lambda phase: added[phase])
        peak = self._held + sum(self._resident.values()) + added[fullest]
        return Row(share, usable_bytes, left, size, fullest, peak)

    @property
    def _phases(self) -> tuple[str, ...]:
        return self.work.phase_settings().phases

    def _largest(self, usable_bytes: float) -> int:
        """The largest batch whose every phase fits all at once; 0 where a group does not."""
        from functools import partial

        from grpo.memory import Fit
        from grpo.memory.budget import DeviceMemory
        from grpo.plan.absent import see_trace
        from grpo.plan.trace import Card as TracedCard
        from grpo.plan.warm_up import largest_batch, warm_up

        group, total = self.work.config.group_size, max(0, int(usable_bytes))
        card = TracedCard(DeviceMemory(total, total, 0), utilization=1.0)
        card.held_bytes = int(self._held + sum(self._resident.values()))
        fit = Fit(card, group_size=group)
        all_of_it = self.work.with_settings(batch_size=self._most // group * group)
        warm_up(fit, all_of_it, partial(see_trace, fit, self._traced), bold=True)
        try:
            return largest_batch(fit, all_of_it)
        except SettingsError:  # not one group
            return 0


def frozen_lines(settings: Calculator) -> tuple[Line, ...]:
    """One line for the models that only stand beside, if there are any."""
    if not settings.frozen:
        return ()
    each, sizes = FROZEN_BYTES[settings.frozen_dtype], " + ".join(f"{n / 1e9:g}" for n in settings.frozen)
    detail = f"{each:g} bytes a parameter ({settings.frozen_dtype})"
    return (Line(f"frozen, {sizes} B", each * sum(settings.frozen), detail),)


def trained_lines(settings: Calculator) -> tuple[Line, ...]:
    """Weights, optimizer and gradients of so many trained parameters."""
    count, weights, optimizer = settings.trainable or 0.0, settings.weights, settings.optimizer or "adamw"
    weights = weights or "bf16+master"
    weight, master, moments = WEIGHT_BYTES[weights], MASTER_BYTES[weights], MOMENT_BYTES[optimizer]
    dtype = weights.partition("+")[0]
    kept = f"{optimizer}: {moments}" + (f", and a master copy in fp32: {master}" if master else "")
    return (
        Line(f"trainable, {count / 1e9:g} B", weight * count, f"{weight} bytes a parameter ({dtype})"),
        Line("optimizer", (master + moments) * count, f"{master + moments} bytes a parameter ({kept})"),
        Line("gradients", weight * count, f"{weight} bytes a parameter ({dtype})"),
    )


def _overhead(settings: Calculator, card: Card) -> Line:
    from grpo.memory.budget import CONTEXT_BYTES

    share = settings.overhead_share
    if share is None and not settings.from_counts:
        return Line("overhead", CONTEXT_BYTES, "CUDA context and cuBLAS's workspace")
    share = OVERHEAD_SHARE if share is None else share
    return Line("overhead", share * card.usable_bytes, f"{100 * share:g} % of the card", share)


def _check_fixed(settings: Calculator, card: Card, lines: Sequence[Line]) -> None:
    """SettingsError where the lines alone are more than the card."""
    from grpo.memory.budget import readable

    held = sum(line.bytes for line in lines)
    if held < card.usable_bytes:
        return
    what = f"model is {settings.train.model}"
    if settings.frozen:
        given = " and ".join(f"{count / 1e9:g} B" for count in settings.frozen)
        what = f"frozen is {given} in {settings.frozen_dtype}"
    elif settings.from_counts:
        what = f"trainable is {(settings.trainable or 0) / 1e9:g} B"
    raise SettingsError(
        f"{what}: {', '.join(f'{line.name}: {readable(line.bytes)}' for line in lines)}; that is "
        f"{readable(held)} before any sample, and {card.name} offers {readable(card.usable_bytes)}: give "
        f"{'fewer or smaller ones' if settings.frozen else 'a smaller one'}, or a larger card with --gpu."
    )


def _sample_bytes(settings: Calculator) -> float | None:
    """Of a sample, as the person gave it; None: not known."""
    if settings.sample_memory is None:
        return None
    try:
        return parse_size(settings.sample_memory)
    except ValueError as error:
        raise SettingsError(f"sample_memory is {error}") from error


# ------------------------------------------------------------------------------------------ for people


def show(found: Calculation, console: Console) -> None:
    """What it is about, the budget, the batches, and how far to trust them."""
    if found.work is not None:
        config, sampling = found.work.config, found.work.config.sampling
        dtype = str(found.work.target.dtype).removeprefix("torch.")
        tokens = f"{found.work.longest_prompt} + {sampling.max_new_tokens} tokens"
        recomputed = config.gradient_checkpointing
        parts = [config.model, dtype, tokens, f"groups of {config.group_size}"]
        parts += [] if recomputed in ("auto", "none") else [f"{recomputed} gradient checkpointing"]
        console.print(", ".join(parts), highlight=False)
    console.print(budget_table(found))
    console.print(batches_table(found))
    for sentence in notes(found):
        console.print(sentence, highlight=False, soft_wrap=True)


def budget_table(found: Calculation) -> Table:
    """Line by line, from the card down to what remains.

    With counts alone there is a second column that counts as published budgets do: 10**9 bytes, and the
    card as it is sold.
    """
    card, from_counts, nominal = found.card, found.settings.from_counts, NOMINAL_GB * found.card.sold_gb
    table = Table("line", title=f"Budget of {card.name}, 1 GB is 2**30 bytes", title_justify="left")
    for column in ("GB", *(["10**9 bytes"] if from_counts else [])):
        table.add_column(column, justify="right")
    table.add_column("how")

    def row(name: str, size: float, published: float, how: str) -> None:
        table.add_row(name, _gb(size), *([f"{published / NOMINAL_GB:.2f}"] if from_counts else []), how)

    def published(line: Line) -> float:
        return line.share * nominal if line.share is not None else line.bytes

    row("card", card.usable_bytes, nominal, f"sold with {card.sold_gb:g}; what CUDA offers")
    table.add_section()
    for line in found.lines:
        row(line.name, line.bytes, published(line), line.detail)
    table.add_section()
    left = nominal - sum(map(published, found.lines))
    row("remains", card.usable_bytes - found.fixed_bytes, left, "for activations, logits, keys and values")
    return table


def batches_table(found: Calculation) -> Table:
    """A row a share of the card: what is left for samples and the largest batch; totals on more cards."""
    known, planned = found.row.batch_size is not None, found.work is not None
    passes = found.settings.accumulate
    counts = [count for count in found.totals() if count * passes > 1]
    what = "Largest batch in shares" if known else "Shares"
    table = Table("share", title=f"{what} of {found.card.name}", title_justify="left")
    columns = [
        "GB",
        "for samples",
        *(["batch"] if known else []),
        *(["fullest in", "peak"] if planned else []),
    ]
    columns += [f"{n} card{'s' * (n > 1)}" + (f" × {passes}" if passes > 1 else "") for n in counts]
    for column in columns:
        table.add_column(column, justify="left" if column == "fullest in" else "right")
    for row in found.rows:
        cells = [f"{100 * row.share:g}%", f"{row.usable_bytes / GB:.2f}", f"{row.left_bytes / GB:.2f}"]
        if known:
            cells.append(str(row.batch_size or "none fits"))
        if planned:
            cells += [row.fullest or "", _gb(row.peak_bytes) if row.peak_bytes else ""]
        table.add_row(*cells, *(str(count * passes * (row.batch_size or 0)) for count in counts))
    return table


def _gb(size: float) -> str:
    """Hundredths of a GB; thousandths where those would say little."""
    return f"{size / GB:.3f}" if abs(size) < GB / 10 else f"{size / GB:.2f}"


def notes(found: Calculation) -> list[str]:
    """How far to trust it, and what does not follow."""
    if found.work is None and found.row.batch_size is not None:
        return ["A sample's bytes are as given: their error is not known."]
    if found.work is None:
        return [
            "Counts do not tell what a sample takes, so no batch follows: give --sample-memory 450MB, or a "
            "--model instead of counts."
        ]
    said = [
        "Tensors are traced, not measured on this card; what its allocator and kernels take besides is what "
        "a share below 100% leaves room for."
    ]
    if (
        found.row.batch_size
        and found.row.batch_size + found.work.config.group_size > found.settings.train.max_batch_size
    ):
        said.append("No larger batch was looked for: --max-batch-size.")
    if not found.card.bf16 and found.settings.train.precision in ("auto", "bf16"):
        falls = "it is emulated, and slow" if found.work.target.is_lower else "this is for fp32"
        said.append(f"{found.card.name} has no native bf16: {falls}.")
    return said


def as_json(found: Calculation) -> dict[str, Any]:
    """All figures; bytes are bytes."""
    card = found.card
    return {
        "card": {"name": card.name, "sold_gb": card.sold_gb, "usable_bytes": card.usable_bytes},
        "model": None if found.work is None else found.work.config.model,
        "precision": None if found.work is None else str(found.work.target.dtype).removeprefix("torch."),
        "lines": [asdict(line) for line in found.lines], "fixed_bytes": found.fixed_bytes,
        "remaining_bytes": card.usable_bytes - found.fixed_bytes,
        "shares": [asdict(row) for row in found.rows],
        "totals": {str(count): total for count, total in found.totals().items()}, "sentences": notes(found),
    }  # fmt: skip


# -------------------------------------------------------------------------------------------- profiles


def write_profiles(found: Calculation, file: Path) -> list[str]:
    """Write a profile for each number of cards, and return their names. SettingsError without a batch.

    A profile's batch size is what an optimizer step sees on all its cards together; how many rows of it go
    through at once, the trainer plans by itself.
    """
    settings, card, group = found.settings, found.card.name, found.settings.train.group_size
    size = (found.row.batch_size or 0) // group * group
    if not size:
        raise SettingsError(
            f"yaml is {file}, but no batch of whole groups of {group} is known to fit "
            f"{settings.train.memory_utilization:.0%} of {card}: give a larger card, shorter texts, or what "
            "a sample takes."
        )
    shared = _shared(found)
    names = {count: f"{card}_{CARD_NAMES.get(count, f'x{count}')}" for count in found.totals()}
    text = [f"# Calculated for {card}, not measured on it: {size} samples at once at most on each card.\n"]
    if "model" not in shared:
        text.append("# The model is not named here: add --model FOLDER of the one it was calculated for.\n")
    text += [yaml.safe_dump(shared, sort_keys=False), "profiles:\n"]
    for count, name in names.items():
        launch = "python" if count == 1 else f"accelerate launch --num_processes {count}"
        text.append(f"  # {launch} train_lean.py --config {shlex.quote(file.name)} --profile {name}\n")
        text.append(f"  {name}:\n    batch_size: {count * size * settings.accumulate}\n")
    file.write_text("".join(text))
    return list(names.values())


def _shared(found: Calculation) -> Mapping[str, Any]:
    """Settings that all profiles have: those of train that were given."""
    flat, defaults = to_flat(found.settings.train), to_flat(Config(max_batch_size=65536))
    always = {"group_size", "max_new_tokens", "memory_utilization"}
    shared = {name: value for name, value in flat.items() if name in always or value != defaults[name]}
    if found.work is not None:
        shared["model"] = found.work.config.model
        shared["precision"] = found.work.config.precision
    return {name: value for name, value in shared.items() if name not in ("batch_size", "max_batch_size")}
