"""What a trainer of TRL's says of memory: metrics of each step, and tables as a run of ours has them."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from grpo.memory import Fit, Pass
from grpo.memory.budget import GB
from grpo.plan.tables import Measured


class MemoryRecord:
    """Of all steps of a run, from what `Fit` has measured."""

    def __init__(self, fit: Fit) -> None:
        self._fit = fit
        self._measured = Measured(fit)
        self.steps = 0

    def note(self, passes: Sequence[Pass]) -> dict[str, float]:
        """A step's passes; its metrics by name."""
        self.steps += 1
        self._measured.note(passes)
        metrics: dict[str, float] = {}
        for phase in dict.fromkeys(each.phase for each in passes):
            own = [each for each in passes if each.phase == phase]
            most = max(own, key=lambda each: each.rows * each.tokens)
            metrics |= {
                f"memory/{phase}_rows": float(most.rows),
                f"memory/{phase}_peak_gb": max(each.process_bytes for each in own) / GB,
                f"memory/{phase}_retries": float(sum(each.retries for each in own)),
            }
        return metrics

    def show(self, title: str, *, planned: bool = False) -> None:
        """A table: what the next step will take at once, or what the largest passes have taken."""
        if planned:
            table = self._planned(title)
            self._measured.begin()
        else:
            table = self._measured.table(self._fit.device.budget(), title=title)
        Console().print("\n", table, sep="")  # below what may stand there, such as a progress bar

    def _planned(self, title: str) -> Table:
        table = Table(title=f"{title}; budget {self._fit.device.budget()}", title_justify="left")
        for heading in ("", "rows at once", "tensors add, GB", "process, GB"):
            table.add_column(heading, justify="right" if heading else "left")
        used = self._fit.device.used_bytes()
        for phase, (rows, batch) in self._fit.plan_again().items():
            size = batch._replace(rows=rows)
            added, needs = self._fit.predict(phase, size), used + self._fit.needs(phase, size)
            table.add_row(phase, str(rows), f"{added / GB:.2f}", f"{needs / GB:.2f}")
        return table
