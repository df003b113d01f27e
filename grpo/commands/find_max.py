"""The largest batch that fits this device, by real training steps, each size in a fresh process.

python scripts/find_max_batch_size.py                                     # GRPO, on rook-tiny
python scripts/find_max_batch_size.py --objective lm --arch llama --data corpus.txt
python scripts/find_max_batch_size.py --prompt-tokens 16 --max-new-tokens 16 --memory-limit 800MB --start 32
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

DONE, WRONG_SETTING = 0, 2
"""Exit statuses."""


def main() -> int:
    """Run the command line."""
    import tyro

    from grpo.commands.screen import print_error, screen
    from grpo.run.screen import configure_logging
    from grpo.workbench.maximum.settings import FindSettings

    console = screen(width=None if sys.stdout.isatty() else 120)
    configure_logging("INFO", screen(stderr=True))
    try:
        settings = tyro.cli(FindSettings, config=(tyro.conf.OmitArgPrefixes,))
        # These load torch: a wrong flag need not wait for it.
        from grpo.workbench.maximum.find import check, find, findings, findings_elsewhere
        from grpo.workbench.maximum.findings import (
            as_json,
            cards_table,
            draw,
            next_table,
            recommendation_table,
            sentences,
        )
        from grpo.workbench.maximum.search import trials_table

        results, predicted = [], {}
        if settings.measured:
            found = findings_elsewhere(settings)
        else:
            checked = check(settings)
            console.print(checked.table)
            results = find(settings, checked)
            console.print(trials_table(results))
            found = findings(settings, checked, results)
            predicted = {r.batch_size: r.predicted_bytes for r in results if r.predicted_bytes}
    except ValueError as error:
        print_error(console, error)
        return WRONG_SETTING
    for sentence in sentences(found):
        console.print(sentence, highlight=False, soft_wrap=True)
    for table in (next_table(found), recommendation_table(found), cards_table(found)):
        console.print(table)
    folder: Path = settings.folder()
    folder.mkdir(parents=True, exist_ok=True)
    content = {**as_json(found), "trials": [asdict(result) for result in results]}
    (folder / "max_batch.json").write_text(json.dumps(content, indent=1) + "\n")
    draw(found, predicted, folder / "max_batch.png")
    console.print(f"{folder / 'max_batch.json'}\n{folder / 'max_batch.png'}", highlight=False, soft_wrap=True)
    return DONE
