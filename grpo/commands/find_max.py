"""The largest batch that fits this device, by real training steps, each size in a fresh process.

grpo-lean find-max                                     # GRPO, on rook-tiny
grpo-lean find-max --objective lm --arch llama --data corpus.txt
grpo-lean find-max --prompt-tokens 16 --max-new-tokens 16 --memory-limit 800MB --start 32
"""

import json

from rich.console import Console

from grpo.workbench.find_max import FindMax, check, find, flags_of, trials_table
from grpo.workbench.find_max import as_json as trials_as_json


def main(settings: FindMax, console: Console) -> None:
    """Check, try, and say what follows."""
    checked = check(settings)
    console.print(checked.table)
    folder = settings.folder()
    trials = find(checked, folder)
    console.print(trials_table(trials))
    from grpo.workbench.findings import (
        as_json,
        cards_table,
        draw,
        findings,
        next_table,
        recommendation_table,
        sentences,
    )

    found = findings(checked, trials, flags_of(settings.train))
    for sentence in sentences(found):
        console.print(sentence, highlight=False, soft_wrap=True)
    for table in (next_table(found), recommendation_table(found), cards_table(found)):
        console.print(table)
    content = {**as_json(found), "trials": trials_as_json(trials)}
    (folder / "max_batch.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(found, folder / "max_batch.png")
    console.print(f"{folder / 'max_batch.json'}\n{folder / 'max_batch.png'}", highlight=False, soft_wrap=True)
