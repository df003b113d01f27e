"""The largest batch for a card that is not there: `grpo-lean calculate --gpu h100`."""

import json

from rich.console import Console

from grpo.workbench.calculate import Calculator, as_json, calculate, show, write_profiles
from grpo.workbench.cards import cards_table


def main(settings: Calculator, console: Console) -> None:
    """Calculate and show, or list the cards."""
    card = settings.card()
    if card is None:
        console.print(cards_table())
        console.print("Choose one with --gpu, or give any other card's size: --gpu-memory 20GB.")
        return
    found = calculate(settings, card)
    show(found, console)
    if settings.yaml is not None:
        names = write_profiles(found, settings.yaml)
        console.print(f"{settings.yaml}: profiles {', '.join(names)}", highlight=False)
    if settings.json is not None:
        settings.json.write_text(json.dumps(as_json(found), indent=1) + "\n")
