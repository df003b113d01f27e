"""The largest batch for a card that is not there: `grpo-lean calculate --gpu h100`."""

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
    # Not before: it takes torch.
    from grpo.workbench.calculate import budget_rows, calculate, share_rows, write_profiles

    figures = calculate(settings, card)
    if figures["planned"]:
        console.print(figures["planned"], highlight=False)
    console.print(table(f"Budget of {card.name}, 1 GB is 2**30 bytes", budget_rows(figures)))
    shares = "Shares" if figures["batch_size"] is None else "Largest batch in shares"
    console.print(table(f"{shares} of {card.name}", share_rows(figures, settings.accumulate)))
    for note in figures["notes"]:
        console.print(note, highlight=False, soft_wrap=True)
    if settings.yaml is not None:
        names = write_profiles(settings, figures, settings.yaml)
        console.print(f"{settings.yaml}: profiles {', '.join(names)}", highlight=False)
    if settings.json is not None:
        settings.json.write_text(json.dumps(figures, indent=1) + "\n")
