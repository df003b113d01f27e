"""What was calculated, as tables and sentences for people, and as JSON."""

from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo.memory.budget import GB
from grpo.workbench.calculator.calculate import Calculation, Row, idle_sentences
from grpo.workbench.calculator.demand import Line

NOMINAL_GB = 10**9


def budget_table(found: Calculation) -> Table:
    """Line by line, from the card down to what remains.

    With counts alone there is a second column that counts as published budgets do: 10**9 bytes, and the
    card as it is sold.
    """
    card, lines, fixed = found.card, found.demand.lines, found.demand.fixed_bytes
    table = Table("line", title=f"Budget of {card.name}, 1 GB is 2**30 bytes", title_justify="left")
    table.add_column("GB", justify="right")
    nominal = NOMINAL_GB * card.sold_gb
    if found.settings.from_counts:
        table.add_column("10**9 bytes", justify="right")
    table.add_column("how")

    def row(name: str, size: float, published: float, how: str) -> None:
        cells = [_gb(size)]
        if found.settings.from_counts:
            cells.append(f"{published / NOMINAL_GB:.2f}")
        table.add_row(name, *cells, how)

    def published(line: Line) -> float:
        return line.share * nominal if line.share is not None else line.bytes

    row("card", card.usable_bytes, nominal, f"sold with {card.sold_gb:g}; what CUDA offers")
    table.add_section()
    for line in lines:
        row(line.name, line.bytes, published(line), line.detail)
    table.add_section()
    left = nominal - sum(map(published, lines))
    row("remains", card.usable_bytes - fixed, left, "for activations, logits, keys and values")
    return table


def batches_table(found: Calculation) -> Table:
    """A row a share of the card: what is left for samples and the largest batch; totals on more cards."""
    known, predicted = found.demand.samples is not None, found.precision is not None
    what = "Largest batch in shares" if known else "Shares"
    table = Table("share", title=f"{what} of {found.card.name}", title_justify="left")
    passes = found.settings.accumulate
    counts = [count for count in found.totals() if count * passes > 1]
    columns = ["GB", "for samples"]
    columns += ["batch"] if known else []
    columns += ["fullest in", "peak"] if predicted else []
    columns += [
        f"{count} card{'s' * (count > 1)}" + (f" × {passes}" if passes > 1 else "") for count in counts
    ]
    for column in columns:
        table.add_column(column, justify="left" if column == "fullest in" else "right")
    for row in found.rows:
        cells = [f"{100 * row.share:g}%", f"{row.usable_bytes / GB:.2f}", f"{row.left_bytes / GB:.2f}"]
        if known:
            cells.append(_size(found, row))
        if predicted:
            peak = row.peak
            cells += (peak.phase, _gb(peak.bytes)) if peak else ("", "")
        table.add_row(*cells, *(str(count * passes * (row.batch_size or 0)) for count in counts))
    return table


def _size(found: Calculation, row: Row) -> str:
    if not row.batch_size:
        return "none fits"
    capped = row.batch_size + found.demand.multiple > found.settings.max_batch_size
    return f"{row.batch_size} or more" if capped else str(row.batch_size)


def _gb(size: float) -> str:
    """Hundredths of a GB; thousandths where those would say little."""
    return f"{size / GB:.3f}" if abs(size) < GB / 10 else f"{size / GB:.2f}"


def notes(found: Calculation) -> list[str]:
    """How far to trust it, and what does not follow."""
    if found.precision is None and found.demand.samples is not None:
        return ["A sample's bytes are as given, or from one measurement: their error is not known."]
    if found.precision is None:
        return [] if found.use else [
            "Counts do not tell what a sample takes, so no batch follows: give --sample-memory 450MB, "
            "or --batch-size and the --measured-share that it holds, or a --model."
        ]  # fmt: skip
    said = [
        "Tensors are traced, not measured on this card; what its allocator and kernels take besides is what "
        "a share below 100% leaves room for."
    ]
    if not found.card.bf16 and found.settings.precision in ("auto", "bf16"):
        falls = "this is for fp32" if found.precision == "fp32" else "it is emulated, and slow"
        said.append(f"{found.card.name} has no native bf16: {falls}.")
    return said


def show(found: Calculation, console: Console) -> None:
    """Print everything."""
    settings = found.settings
    if found.precision is not None:
        lengths = (
            f"{settings.prompt_tokens} + {settings.max_new_tokens} tokens, groups of {settings.group_size}"
        )
        parts = [settings.model.name, settings.objective, found.precision]
        parts += [lengths] if settings.objective == "grpo" else []
        recomputed = settings.gradient_checkpointing
        parts += [] if recomputed == "auto" else [f"{recomputed} gradient checkpointing"]
        console.print(", ".join(parts), highlight=False)
        if settings.model.model is None and settings.model.arch is None:
            console.print("(no model is named: --model or --arch is for another)", highlight=False)
    console.print(budget_table(found))
    console.print(batches_table(found))
    for sentence in [*idle_sentences(found), *notes(found)]:
        console.print(sentence, highlight=False)


def as_json(found: Calculation) -> dict[str, Any]:
    """All figures; bytes are bytes."""
    card = found.card
    return {
        "card": {"name": card.name, "sold_gb": card.sold_gb, "usable_bytes": card.usable_bytes},
        "model": None if found.precision is None else found.settings.model.name,
        "precision": found.precision,
        "lines": [asdict(line) for line in found.demand.lines],
        "fixed_bytes": found.demand.fixed_bytes,
        "remaining_bytes": card.usable_bytes - found.demand.fixed_bytes,
        "shares": [asdict(row) for row in found.rows],
        "use": None if found.use is None else asdict(found.use),
        "totals": {str(count): total for count, total in found.totals().items()},
        "sentences": [*idle_sentences(found), *notes(found)],
    }
