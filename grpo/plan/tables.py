"""The memory plan before a run, and what was measured after it, as tables for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from grpo.memory import Budget
from grpo.memory.budget import GB
from grpo.memory.phase import OUTSIDE
from grpo.memory.planner import PhasePlan


def plan_table(plans: Mapping[str, PhasePlan], budget: Budget) -> Table:
    """A column a phase: rows at once, what the peak consists of, its error, and the headroom, in GB."""
    table = Table("in GB", title=f"Memory planned; budget {budget}", title_justify="left")
    for phase in plans:
        table.add_column(phase, justify="right")
    footprints = [plan.footprint for plan in plans.values()]

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("rows at once", *(str(plan.rows) for plan in plans.values()))
    table.add_section()
    names = dict.fromkeys(name for footprint in footprints for name in footprint.parts)
    for part in sorted(names, key=lambda name: name == OUTSIDE):  # last
        sizes = [footprint.parts.get(part, 0.0) for footprint in footprints]
        row(part, *(f"{size / GB:.3f}" if size else "" for size in sizes))
    table.add_section()
    row("predicted peak", *(f"{each.peak_bytes / GB:.3f}" for each in footprints))
    row("give or take", *(f"{each.error_bytes / GB:.3f}" for each in footprints))
    rooms = [budget.usable_bytes - each.peak_bytes for each in footprints]
    row("headroom", *(f"{room / GB:.2f}, {room / budget.usable_bytes:.0%}" for room in rooms))
    return table


def measured_table(records: Sequence[Mapping[str, Any]], budget: Budget) -> Table:
    """Per phase, from the lines of memory.jsonl: the highest peak beside what was predicted for it."""
    table = Table(title=f"Memory measured, budget {budget}", title_justify="left")
    for column in ("peak of", "rows", "predicted", "measured", "headroom", "retries"):
        table.add_column(column, justify="left" if column == "peak of" else "right")
    for phase in dict.fromkeys(record["phase"] for record in records):
        mine = [record for record in records if record["phase"] == phase]
        highest = max(mine, key=lambda record: record["device_used_bytes"])
        room = budget.usable_bytes - highest["device_used_bytes"]
        table.add_row(
            phase,
            str(highest["rows"]),
            f"{highest['predicted_bytes'] / GB:.2f} GB",
            f"{highest['device_used_bytes'] / GB:.2f} GB",
            f"{room / GB:.2f} GB, {room / budget.usable_bytes:.0%}",
            str(sum(record["retries"] for record in mine)),
        )
    return table
