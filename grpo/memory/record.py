"""What a loop that takes the rows that fit says of memory: metrics of each step, changes, tables."""

from collections.abc import Sequence

from loguru import logger
from rich.console import Console
from rich.table import Table

from grpo.memory.budget import GB
from grpo.memory.loop import Fit, Pass


class MemoryRecord:
    """Of all steps of a run, from what `Fit` has measured."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._batch: dict[str, int] = {}
        self._last: dict[str, Pass] = {}
        self._largest: dict[str, Pass] = {}
        self._retries: dict[str, int] = {}
        self.steps = 0

    def note(self, passes: Sequence[Pass]) -> dict[str, float]:
        """A step's passes; its metrics by name."""
        self.steps += 1
        metrics: dict[str, float] = {}
        for phase in dict.fromkeys(each.phase for each in passes):
            own = [each for each in passes if each.phase == phase]
            most = max(own, key=lambda each: each.rows * each.tokens)
            retries = sum(each.retries for each in own)
            self._tell_change(phase, most)
            self._last[phase] = most
            self._largest[phase] = max(most, self._largest.get(phase, most), key=lambda each: each.peak_bytes)
            self._retries[phase] = self._retries.get(phase, 0) + retries
            self._batch[phase] = max(sum(each.rows for each in own), self._batch.get(phase, 0))
            metrics |= {
                f"memory/{phase}_rows": float(most.rows),
                f"memory/{phase}_peak_gb": max(each.peak_bytes for each in own) / GB,
                f"memory/{phase}_retries": float(retries),
            }
        return metrics

    def _tell_change(self, phase: str, new: Pass) -> None:
        old = self._last.get(phase)
        if old is None or old.rows == new.rows:
            return
        if new.rows > old.rows:
            why = "room for more"
        else:
            why = "memory ran out" if self._fit.ran_out(phase) else "longer rows, or less room"
        logger.info(
            "plan: {} {} -> {} rows at once: {}; {}", phase, old.rows, new.rows, why, self._fit.budget()
        )

    def show(self, title: str, *, planned: bool = False) -> None:
        """A table: what the next step will take at once, or what the largest passes have taken."""
        table = Table(title=f"{title}; budget {self._fit.budget()}", title_justify="left")
        for heading in ("", "rows at once", "predicted GB", "give or take", "measured GB", "retries"):
            table.add_column(heading, justify="right" if heading else "left")
        for phase, largest in self._largest.items():
            rows, measured = largest.rows, f"{largest.peak_bytes / GB:.2f}"
            expected: float | None = largest.predicted_bytes
            error = float(largest.error_bytes)
            if planned:
                rows, measured = self._fit.plan(phase, self._batch[phase], tokens=largest.tokens), ""
                expected, error = self._fit.predict(phase, rows, tokens=largest.tokens)
            table.add_row(
                phase, str(rows),
                "the first" if expected is None else f"{expected / GB:.2f}",
                "" if expected is None else f"{error / GB:.2f}",
                measured, str(self._retries[phase]),
            )  # fmt: skip
        Console().print("\n", table, sep="")  # below what may stand there, such as a progress bar
