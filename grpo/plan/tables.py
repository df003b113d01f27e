"""The memory plan before a run, and what was measured after it, as tables for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.table import Table

from grpo.memory import Budget, Fit, Pass, Size
from grpo.memory.budget import GB, readable
from grpo.plan.workload import Workload

ELSE = "everything else in the process"
"""Interpreter, libraries, context, and what an allocator keeps."""


@dataclass(frozen=True)
class Plan:
    """What was planned at one time. sizes: of each phase's passes, at the longest. Bytes by component."""

    sizes: Mapping[str, Size]
    parts: Mapping[str, Mapping[str, float]]
    budget: Budget

    @property
    def largest(self) -> Mapping[str, float]:
        """Bytes by component of the phase that holds most."""
        return max(self.parts.values(), key=lambda parts: sum(parts.values()))


def plan_of(fit: Fit, work: Workload, resident: Mapping[str, int], *, trained: int) -> Plan:
    """What `fit` plans now. resident: bytes that exist between phases. trained: numbers."""
    used = fit.device.used_bytes()
    parts: dict[str, dict[str, float]] = {}
    sizes = {phase: work.size(min(rows, work.rows_here)) for phase, rows in fit.planned().items()}
    for phase, size in sizes.items():
        added = added_parts(fit.predict(phase, size), work.added_parts(phase, size, trained))
        parts[phase] = {**resident, **added, ELSE: max(0.0, used - sum(resident.values()))}
    return Plan(sizes, parts, fit.device.budget())


def added_parts(added: float, closed: Mapping[str, int]) -> dict[str, float]:
    """What a phase adds, by component. closed: what has a closed form, which is an upper bound."""
    share = min(1.0, added / max(1, sum(closed.values())))
    known = {name: share * size for name, size in closed.items()}
    return {**known, "activations": max(0.0, added - sum(known.values()))}


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
    peaks = [sum(parts.values()) for parts in plan.parts.values()]
    table.add_row("peak", *(f"{peak / GB:.3f}" for peak in peaks))
    table.add_row("budget", *(f"{plan.budget.usable_bytes / GB:.3f}" for _ in peaks))
    rooms = [plan.budget.usable_bytes - peak for peak in peaks]
    table.add_row(
        "headroom", *(f"{room / GB:.2f}, {room / max(1, plan.budget.usable_bytes):.0%}" for room in rooms)
    )
    return table


@dataclass
class Measured:
    """The largest passes of a run, by phase, and what was said of such before its first step."""

    fit: Fit
    largest: dict[str, Pass] = field(default_factory=dict)
    said: dict[str, int] = field(default_factory=dict)
    """Bytes that tensors were predicted to add to those passes, before the first step."""
    retries: dict[str, int] = field(default_factory=dict)
    changes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """What is known by now is what was said before."""
        self._first = {phase: self.fit.formula(phase) for phase in self.fit.planned()}

    def note(self, passes: Sequence[Pass]) -> None:
        """Those of a step."""
        for each in passes:
            self.retries[each.phase] = self.retries.get(each.phase, 0) + each.retries
            if each.reason:
                self.changes.append(f"{each.phase} {each.reason}")
            old = self.largest.get(each.phase)
            if old is None or (each.added_bytes or 0, each.process_bytes) > (
                old.added_bytes or 0, old.process_bytes,
            ):  # fmt: skip
                self.largest[each.phase] = each
                if formula := self._first.get(each.phase):
                    self.said[each.phase] = int(formula(each.size))

    def table(self, budget: Budget, title: str = "Memory measured, in GB") -> Table:
        """A row a phase: the largest pass, what its tensors added and were said to, and the process then."""
        table = Table(title=f"{title}; budget {budget}", title_justify="left")
        for column in (
            "phase",
            "rows",
            "said",
            "measured",
            "off by",
            "process",
            "s",
            "retries",
        ):
            table.add_column(column, justify="left" if column == "phase" else "right")
        for phase, largest in self.largest.items():
            said, measured = self.said.get(phase), largest.added_bytes
            off = f"{said / measured - 1:+.1%}" if said is not None and measured else ""
            table.add_row(
                phase, str(largest.rows), "" if said is None else f"{said / GB:.3f}",
                "" if measured is None else f"{measured / GB:.3f}", off,
                f"{largest.process_bytes / GB:.2f}", f"{largest.seconds:.2f}", str(self.retries[phase]),
            )  # fmt: skip
        if self.changes:
            table.caption, table.caption_justify = "\n".join(["Changes of the plan:", *self.changes]), "left"
        return table


def in_words(parts: Mapping[str, float]) -> str:
    """Bytes by component, in a sentence."""
    return ", ".join(f"{name} {readable(size)}" for name, size in parts.items() if size)
