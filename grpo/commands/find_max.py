"""The largest batch that fits this device, by real training steps, each size in a fresh process.

grpo-lean find-max                                     # GRPO, on rook-tiny
grpo-lean find-max --objective lm --arch llama --data corpus.txt
grpo-lean find-max --prompt-tokens 16 --max-new-tokens 16 --memory-limit 800MB --start 32
"""

import json
from dataclasses import asdict

from rich.console import Console

from grpo.workbench.find_max import check, find, trial_row
from grpo.workbench.findings import findings, flags_of
from grpo.workbench.line import leaves_the_line
from grpo.workbench.settings import FindMax, new_folder
from grpo.workbench.tables import table

TRIAL = ("batch_size", "status", "message", "peak_bytes", "allocated_bytes", "reserved_bytes", "steps")
"""Of a trial, in JSON."""


def main(settings: FindMax, console: Console) -> None:
    """Check, try, and say what follows."""
    checked = check(settings)
    console.print(table("Before the first trial", checked.rows))
    folder = settings.output or new_folder("max-batch")
    trials = find(checked, folder)
    console.print(table("Trials", [trial_row(trial) for trial in trials]))
    result = findings(checked, trials, flags_of(settings.train))
    console.print(table("What follows", result.facts()))
    if following := result.next_sizes():
        console.print(table("Next sizes", following))
    console.print(table("Recommended", result.recommended()))
    content = {
        "maximum": result.maximum, "total_bytes": result.total_bytes, "margin_bytes": result.margin_bytes,
        "headroom_bytes": result.total_bytes - result.peaks[result.maximum],
        "line": asdict(result.line) if result.line is not None else None,
        "leaves_the_line_at": leaves_the_line(result.peaks), "facts": result.facts(),
        "next": result.next_sizes(), "recommended": result.recommended(),
        "trials": [{name: getattr(trial, name) for name in TRIAL} for trial in trials],
    }  # fmt: skip
    (folder / "max_batch.json").write_text(json.dumps(content, indent=1) + "\n")
    result.draw(folder / "max_batch.png")
    console.print(f"{folder / 'max_batch.json'}\n{folder / 'max_batch.png'}", highlight=False, soft_wrap=True)
