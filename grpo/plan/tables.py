"""The memory plan before a run, and what was measured after it, as tables for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from grpo.logs.tables import Row, table
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
    usable, peaks = plan.budget.usable_bytes, {name: sum(it.values()) for name, it in plan.parts.items()}
    left = {phase: usable - peak for phase, peak in peaks.items()}
    names = dict.fromkeys(name for parts in plan.parts.values() for name in parts)
    rows: list[Row | None] = [
        _row("rows at once", {phase: str(size.rows) for phase, size in plan.sizes.items()})
    ]
    rows.append(None)
    for name in sorted(names, key=lambda name: name == ELSE):  # last
        sizes = {phase: parts.get(name, 0.0) for phase, parts in plan.parts.items()}
        rows.append(_row(name, {phase: _in_gb(size) for phase, size in sizes.items() if size >= 0.0005 * GB}))
    rows.append(None)
    rows.append(_row("peak", {phase: _in_gb(peak) for phase, peak in peaks.items()}))
    rows.append(_row("budget", {phase: _in_gb(usable) for phase in peaks}))
    shares = {phase: f"{size / GB:.2f}, {size / max(1, usable):.0%}" for phase, size in left.items()}
    rows.append(_row("headroom", shares))
    return table(rows, f"Memory planned; budget {plan.budget}")


def _row(name: str, cells: Mapping[str, str]) -> Row:
    return {"in GB": name, **cells}


def _in_gb(num_bytes: float) -> str:
    return f"{num_bytes / GB:.3f}"


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
        rows = []
        for phase, largest in self.largest.items():
            predicted, measured = largest.predicted_bytes, largest.added_bytes
            rows.append(
                {
                    "phase": phase,
                    "rows": largest.rows,
                    "predicted": "" if predicted is None else _in_gb(predicted),
                    "measured": "" if measured is None else _in_gb(measured),
                    "off by": f"{predicted / measured - 1:+.1%}" if predicted and measured else "",
                    "process": f"{largest.process_bytes / GB:.2f}",
                    "s": f"{largest.seconds:.2f}",
                    "retries": self.retries[phase],
                }
            )
        caption = "\n".join(["Changes of the plan:", *self.changes]) if self.changes else ""
        return table(rows, f"{title}; budget {budget}", caption=caption)


def _held(largest: Pass) -> tuple[int, int]:
    return largest.added_bytes or 0, largest.process_bytes
