"""The largest batch for a card that is not there: `python scripts/calculate_batch_size.py --gpu h100`."""

import json

from rich.console import Console

from grpo.workbench.cards import cards_rows
from grpo.workbench.settings import Calculator
from grpo.workbench.tables import table


def main(settings: Calculator, console: Console) -> None:
    """Calculate and show, or list the cards."""
    card = settings.card()
    if card is None:
        console.print(table("Cards known here (1 GB is 2**30 bytes)", cards_rows()))
        console.print("Choose one with --gpu, or give any other card's size: --gpu-memory 20GB.")
        return
    from grpo.workbench import calculate  # slow: which cards there are need not wait for it

    found = calculate.calculate(settings, card)
    if found.work is not None:
        console.print(calculate.what_is_planned(found), highlight=False)
    console.print(table(f"Budget of {card.name}, 1 GB is 2**30 bytes", calculate.budget_rows(found)))
    shares = "Shares" if found.batch_size is None else "Largest batch in shares"
    console.print(table(f"{shares} of {card.name}", calculate.share_rows(found)))
    for note in calculate.notes(found):
        console.print(note, highlight=False, soft_wrap=True)
    if settings.yaml is not None:
        names = calculate.write_profiles(found, settings.yaml)
        console.print(f"{settings.yaml}: profiles {', '.join(names)}", highlight=False)
    if settings.json is not None:
        settings.json.write_text(json.dumps(calculate.as_json(found), indent=1) + "\n")
