"""The largest batch for a card that is not there: `python scripts/calculate_batch_size.py --gpu h100`."""

import json

DONE, WRONG_SETTING = 0, 2
"""Exit statuses."""


def main() -> int:
    """Run the command line."""
    import tyro

    from grpo.commands.screen import print_error, screen
    from grpo.run.screen import configure_logging
    from grpo.workbench.calculator.cards import cards_table
    from grpo.workbench.calculator.settings import CalculatorSettings

    console = screen()
    if not console.is_terminal:
        console = screen(width=110)
    configure_logging("WARNING", console)
    try:
        settings = tyro.cli(CalculatorSettings, config=(tyro.conf.OmitArgPrefixes,))
        card = settings.card()
        if card is None:
            console.print(cards_table())
            console.print("Choose one with --gpu, or give any other card's size: --gpu-memory 20GB.")
            return DONE
        # These load torch: a wrong flag need not wait for it.
        from grpo.workbench.calculator.calculate import calculate
        from grpo.workbench.calculator.profiles import write_profiles
        from grpo.workbench.calculator.tables import as_json, show

        found = calculate(settings, card)
        show(found, console)
        if settings.yaml is not None:
            names = write_profiles(found, settings.yaml)
            console.print(f"{settings.yaml}: profiles {', '.join(names)}", highlight=False)
        if settings.json is not None:
            settings.json.write_text(json.dumps(as_json(found), indent=1) + "\n")
    except ValueError as error:
        print_error(screen(stderr=True), error)
        return WRONG_SETTING
    return DONE
