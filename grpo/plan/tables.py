"""The memory plan before a run, and what was measured after it, as tables for people."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from grpo.memory import Budget
from grpo.memory.budget import GB
from grpo.memory.phase import KEPT, OUTSIDE, Footprint
from grpo.memory.planner import PhasePlan


def plan_table(
    plans: Mapping[str, PhasePlan],
    budget: Budget,
    worst: Mapping[str, Footprint],
    expected: Mapping[str, Footprint] | None = None,
) -> Table:
    """A column a phase: rows at once, what the process holds at its peak, how exact, and the headroom, in GB.

    worst: for the longest prompt, and completions of full length. expected: for texts like the first ones.
    """
    table = Table("in GB", title=f"Memory planned; budget {budget}", title_justify="left")
    for phase in plans:
        table.add_column(phase, justify="right")

    def row(name: str, *cells: str) -> None:
        table.add_row(name, *cells)

    row("rows at once", *(str(plan.rows) for plan in plans.values()))
    table.add_section()
    names = dict.fromkeys(name for footprint in worst.values() for name in footprint.parts)
    for part in sorted(names, key=lambda name: (name == KEPT) + 2 * (name == OUTSIDE)):  # last
        sizes = [footprint.parts.get(part, 0.0) for footprint in worst.values()]
        row(part, *(f"{size / GB:.3f}" if size >= 0.0005 * GB else "" for size in sizes))
    for name, footprints in (("worst case", worst), ("expected", expected)):
        if footprints is not None:
            table.add_section()
            row(name, *(f"{each.peak_bytes / GB:.3f}" for each in footprints.values()))
            row("give or take", *(f"{each.error_bytes / GB:.3f}" for each in footprints.values()))
    table.add_section()
    rooms = [budget.usable_bytes - each.peak_bytes for each in worst.values()]
    row("headroom", *(f"{room / GB:.2f}, {room / budget.usable_bytes:.0%}" for room in rooms))
    return table


def measured_table(records: Sequence[Mapping[str, Any]], budget: Budget) -> Table:
    """Per phase, from the lines of memory.jsonl: the highest peak, and what was said of it.

    At most: as it was printed before the first step. Expected: for the shapes that came, by what was known
    then. Refined: by what was measured since, the measurement itself excepted.
    """
    table = Table(title=f"Memory measured, in GB; budget {budget}", title_justify="left")
    for column in ("peak of", "rows", "at most", "expected", "measured", "within", "refined", "retries"):
        table.add_column(column, justify="left" if column == "peak of" else "right")
    for phase in dict.fromkeys(record["phase"] for record in records):
        mine = [record for record in records if record["phase"] == phase]
        highest = max(mine, key=lambda record: record["device_used_bytes"])
        retries = sum(record["retries"] for record in mine)
        measured, refined = (highest[name] / GB for name in ("device_used_bytes", "predicted_bytes"))
        said = ("worst_bytes", "expected_bytes", "expected_error_bytes")
        if all(name in highest for name in said):  # else of a run by an older version
            most, expected, error = (highest[name] / GB for name in said)
            cells = (
                f"{most:.2f}",
                f"{expected:.2f}±{error:.2f}",
                f"{measured:.2f}",
                _verdict(measured, expected, error),
            )
        else:
            cells = ("", "", f"{measured:.2f}", "")
        table.add_row(phase, str(highest["rows"]), *cells, f"{refined:.2f}", str(retries))
    return table


def _verdict(measured: float, expected: float, error: float) -> str:
    if abs(measured - expected) <= error:
        return "yes"
    return "more" if measured > expected else "less"
