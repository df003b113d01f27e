"""The memory plan before a run, and what was measured after it, as tables for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from grpo.memory import Budget, Fit, Pass, PassSize
from grpo.memory.budget import GB
from grpo.plan.phase_probe import PhaseProbe

ELSE = "everything else in the process"
"""Interpreter, libraries, context, and what an allocator keeps."""


@dataclass(frozen=True)
class Plan:
    """A plan that was made at one time. sizes: of each phase's passes, at the longest. Bytes by component."""

    sizes: Mapping[str, PassSize]
    parts: Mapping[str, Mapping[str, float]]
    budget: Budget


def plan_of(fit: Fit, phases: PhaseProbe) -> Plan:
    """Returns the plan that `fit` makes now."""
    work, resident = phases.work, phases.resident()
    rest = max(0.0, fit.device.used_bytes() - sum(resident.values()))
    sizes = {phase: work.size(min(rows, work.rows_here), phase) for phase, rows in fit.planned().items()}
    parts: dict[str, Mapping[str, float]] = {}
    for phase, size in sizes.items():
        added, known = fit.predict(phase, size), phases.known_parts(phase, size)
        share = min(1.0, added / max(1, sum(known.values())))  # of upper bounds
        known_bytes = {name: share * num_bytes for name, num_bytes in known.items()}
        activations = max(0.0, added - sum(known_bytes.values()))
        parts[phase] = {**resident, **known_bytes, "activations": activations, ELSE: rest}
    return Plan(sizes, parts, fit.device.budget())


def plan_table(plan: Plan) -> Table:
    """A column a phase: rows at once, bytes of tensors by component at its peak, in GB, and the headroom."""
    table = Table("in GB", title=f"Memory planned; budget {plan.budget}", title_justify="left")
    for phase in plan.sizes:
        table.add_column(phase, justify="right")
    table.add_row("rows at once", *(str(size.rows) for size in plan.sizes.values()))
    table.add_section()
    names = dict.fromkeys(name for parts in plan.parts.values() for name in parts)
    for name in sorted(names, key=lambda name: name == ELSE):  # last
        sizes = [parts.get(name, 0.0) for parts in plan.parts.values()]
        table.add_row(name, *(f"{size / GB:.3f}" if size >= 0.0005 * GB else "" for size in sizes))
    table.add_section()
    usable, peaks = plan.budget.usable_bytes, [sum(parts.values()) for parts in plan.parts.values()]
    table.add_row("peak", *(f"{peak / GB:.3f}" for peak in peaks))
    table.add_row("budget", *(f"{usable / GB:.3f}" for _ in peaks))
    table.add_row(
        "headroom", *(f"{(usable - peak) / GB:.2f}, {(usable - peak) / max(1, usable):.0%}" for peak in peaks)
    )
    return table


@dataclass
class Measured:
    """The largest passes of a run, by phase, with what was predicted of them before they were made."""

    largest: dict[str, Pass] = field(default_factory=dict)
    retries: dict[str, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)

    def note(self, passes: Sequence[Pass]) -> None:
        """Takes note of a step's passes."""
        for new in passes:
            phase, before = new.phase, self.largest.get(new.phase)
            self.retries[phase] = self.retries.get(phase, 0) + new.retries
            if new.reason:
                self.changes.append(f"{phase} {new.reason}")
            if before is None or _held(new) > _held(before):
                self.largest[phase] = new

    def table(self, budget: Budget, title: str = "Memory measured, in GB") -> Table:
        """Returns a row for each phase: its largest pass, and what it was predicted and measured to add."""
        table = Table(title=f"{title}; budget {budget}", title_justify="left")
        for column in ("phase", "rows", "predicted", "measured", "off by", "process", "s", "retries"):
            table.add_column(column, justify="left" if column == "phase" else "right")
        for phase, largest in self.largest.items():
            predicted, measured = largest.predicted_bytes, largest.added_bytes
            table.add_row(
                phase,
                str(largest.rows),
                "" if predicted is None else f"{predicted / GB:.3f}",
                "" if measured is None else f"{measured / GB:.3f}",
                f"{predicted / measured - 1:+.1%}" if predicted is not None and measured else "",
                f"{largest.process_bytes / GB:.2f}",
                f"{largest.seconds:.2f}",
                str(self.retries[phase]),
            )
        if self.changes:
            table.caption, table.caption_justify = "\n".join(["Changes of the plan:", *self.changes]), "left"
        return table


def _held(largest: Pass) -> tuple[int, int]:
    return largest.added_bytes or 0, largest.process_bytes
