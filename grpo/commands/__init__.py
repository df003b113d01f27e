"""What people type: `grpo-lean COMMAND`, and the files of the repository that do the same."""

import io
import os
import re
import sys
from collections.abc import Callable
from importlib import import_module
from os.path import expanduser
from typing import TYPE_CHECKING, NamedTuple

from grpo.environment import restart_without_thread_cache, set_library_defaults, unsupported

if TYPE_CHECKING:
    from rich.console import Console

WRONG_USAGE, INTERRUPTED = 2, 130
"""Exit statuses."""
WIDTH = 150
"""Letters of a line that goes into a file."""


class Command(NamedTuple):
    what: str
    example: str
    trains: bool = False
    """Whether it takes steps, for which malloc is tuned (`restart_without_thread_cache`)."""
    level: str | None = None
    """What is logged at least. The module's `main` is given a console, returns a status or nothing for 0,
    and its ValueErrors are what people can mend; None: it sees to all of that itself."""


COMMANDS = {
    "train": Command("train a language model with GRPO", "--steps 5 --batch-size 16", trains=True),
    "monitor": Command("train and watch: is memory growing?", "200 64", True, "WARNING"),
    "evaluate": Command("held-out quality of a model or a run", "runs/NAME"),
    "uci": Command("a model as an engine for chess programs", "--model runs/NAME"),
    "match": Command("games of a model against an engine or a model", "runs/NAME --against rook-tiny"),
    "find-max": Command("the largest batch that fits, by real steps", "--memory-limit 800MB", True, "INFO"),
    "calculate": Command("the largest batch for a card that is not there", "--gpu rtx4090", level="WARNING"),
    "sweep": Command("one model at several batch sizes", "--batch-sizes 8 32", True, "INFO"),
    "report": Command("a run or a sweep as one page", "runs/NAME", level="INFO"),
    "check": Command("what this machine reaches, and what is switched off", "", level="INFO"),
}
"""By name; the module is called the same."""


def main() -> int:
    """`grpo-lean COMMAND …`, the installed command."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else WRONG_USAGE
    name = words[0]
    if name not in COMMANDS:
        print(f"{name!r} is no command: give one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return WRONG_USAGE
    sys.argv[:2] = [f"grpo-lean {name}"]
    return run(name)


def run(name: str) -> int:
    """One command with the words of `sys.argv`; its exit status."""
    _prepare()
    if trouble := unsupported():
        print(f"error {trouble}", file=sys.stderr)
        return WRONG_USAGE
    if COMMANDS[name].trains:
        restart_without_thread_cache()
    set_library_defaults()
    try:
        return call(name)
    except KeyboardInterrupt:
        return INTERRUPTED


def call(name: str) -> int:
    """The command itself; its exit status."""
    module, level = import_module(f"grpo.commands.{name.replace('-', '_')}"), COMMANDS[name].level
    status: int = module.main() if level is None else _framed(module.main, level)
    return status


def _framed(action: Callable[["Console"], int | None], level: str) -> int:
    """Its status; what a person can mend is one line."""
    from grpo.commands.screen import print_error, screen
    from grpo.run.screen import configure_logging

    errors = screen(stderr=True)
    configure_logging(level, errors)
    try:
        return action(screen(width=None if sys.stdout.isatty() else WIDTH)) or 0
    except ValueError as error:
        print_error(errors, error)
        return WRONG_USAGE


def _prepare() -> None:
    """Take words as shells mean them, and let everything be printed wherever that goes."""
    home = expanduser("~")  # which bash puts in the place of ~ in --runs-dir ~/runs, and not behind a =
    sys.argv[1:] = [re.sub(r"^(--[\w-]+=)~(?=/)", lambda it: it[1] + home, word) for word in sys.argv[1:]]
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # closed, as of a service
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # on a terminal that knows ASCII only


def _overview() -> str:
    lines = [
        "Train language models with GRPO: the batch always fits, and groups stay whole.", "",
        "usage: grpo-lean COMMAND [FLAGS]", "",
        *(f"  {name:<10} {each.what:<52} {each.example}".rstrip() for name, each in COMMANDS.items()), "",
        "grpo-lean COMMAND --help says more of each.",
    ]  # fmt: skip
    return "\n".join(lines)
