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
            of_phase = [each for each in passes if each.phase == phase]
            largest = max(of_phase, key=lambda each: each.rows * each.tokens)
            metrics |= {
                f"memory/{phase}_rows": float(largest.rows),
                f"memory/{phase}_peak_gb": max(each.process_bytes for each in of_phase) / GB,
                f"memory/{phase}_retries": float(sum(each.retries for each in of_phase)),
            }
        return metrics

    def show_plan(self) -> None:
        """What the next step will take at once."""
        fit = self._fit
        title = f"Memory planned after the first step; budget {fit.device.budget()}"
        table = Table("", title=title, title_justify="left")
        for heading in ("rows at once", "tensors add, GB", "process, GB"):
            table.add_column(heading, justify="right")
        used = fit.device.used_bytes()
        for phase, (rows, batch) in fit.plan_again().items():
            size = batch._replace(rows=rows)
            gigabytes = fit.predict(phase, size) / GB, (used + fit.needs(phase, size)) / GB
            table.add_row(phase, str(rows), *(f"{number:.2f}" for number in gigabytes))
        self._measured.begin()
        _print(table)

    def show_measured(self) -> None:
        """What the largest passes have taken."""
        _print(self._measured.table(self._fit.device.budget(), title="Memory, most of all steps"))


def _print(table: Table) -> None:
    Console().print("\n", table, sep="")  # below what may stand there, such as a progress bar
