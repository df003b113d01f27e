"""Memory metrics of a trainer of TRL's for one step, and a table of what it plans."""

from collections.abc import Sequence

from rich.table import Table

from grpo.logs.tables import table
from grpo.memory import Fit, Pass
from grpo.memory.budget import GB


def step_metrics(passes: Sequence[Pass]) -> dict[str, float]:
    """Returns metrics of a step's passes, by name."""
    metrics: dict[str, float] = {}
    for phase in dict.fromkeys(item.phase for item in passes):
        of_phase = [item for item in passes if item.phase == phase]
        largest = max(of_phase, key=lambda item: item.rows * item.tokens)
        metrics |= {
            f"memory/{phase}_rows": float(largest.rows),
            f"memory/{phase}_peak_gb": max(item.process_bytes for item in of_phase) / GB,
            f"memory/{phase}_retries": float(sum(item.retries for item in of_phase)),
        }
    return metrics


def plan_table(fit: Fit) -> Table:
    """Returns the table of rows that the next step takes at once."""
    used, shown = fit.device.used_bytes(), []
    for phase, (rows, batch) in fit.plan_again().items():
        size = batch._replace(rows=rows)
        shown.append(
            {
                "phase": phase,
                "rows at once": rows,
                "tensors add, GB": f"{fit.predict(phase, size) / GB:.2f}",
                "process, GB": f"{(used + fit.needs(phase, size)) / GB:.2f}",
            }
        )
    return table(shown, f"Memory planned after the first step; budget {fit.device.budget()}")
