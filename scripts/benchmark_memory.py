"""How well memory is predicted and planned, and what that costs: four benchmarks on the CPU."""

import sys

import tyro
from benchmarks.accuracy import accuracy
from benchmarks.limits import limits
from benchmarks.planning import overhead, rows
from benchmarks.results import CONSOLE

from grpo.environment import set_library_defaults
from grpo.run.screen import configure_logging

if __name__ == "__main__":
    set_library_defaults()
    configure_logging("INFO", CONSOLE)
    commands = {"accuracy": accuracy, "limits": limits, "rows": rows, "overhead": overhead}
    sys.exit(tyro.extras.subcommand_cli_from_dict(commands, description=__doc__))
