"""The commands that people type: `grpo-lean COMMAND`, and the files of the repository that do the same."""

import io
import os
import re
import sys
from codecs import lookup
from contextlib import nullcontext, redirect_stderr
from importlib import import_module
from os.path import expanduser
from typing import Any, NamedTuple

from grpo.environment import launched_processes, set_library_defaults, unsupported
from grpo.errors import UserError

DONE, FAILED, WRONG_USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit statuses."""
WIDTH = 150
"""Letters of a line that goes into a file."""


class Command(NamedTuple):
    """A line of the overview, and how it is obeyed.

    The action is given the settings and a console, and returns an exit status or nothing for 0; its
    UserErrors and EngineErrors are what people can mend. Both are MODULE:NAME.
    """

    what: str
    example: str
    action: str
    settings: str
    """A dataclass, whose `parse` reads the words, or tyro if it has none; or a function that reads them."""
    level: str = "INFO"
    """The least level that is logged."""


_OWN, _BENCH, _SETTINGS = "grpo.commands", "grpo.commands.workbench", "grpo.workbench.settings"
COMMANDS = {
    "train": Command(
        "train a language model with GRPO",
        "--steps 5 --batch-size 16",
        f"{_OWN}.train:main",
        "grpo.config:parse_command_line",
    ),
    "monitor": Command(
        "train and watch: is memory growing?",
        "200 64",
        f"{_BENCH}:monitor",
        f"{_BENCH}:parse_monitor",
        level="WARNING",
    ),
    "evaluate": Command(
        "held-out quality of a model or a run",
        "runs/NAME",
        f"{_OWN}.evaluate:main",
        f"{_OWN}.evaluate:EvaluateConfig",
    ),
    "uci": Command(
        "a model as an engine for chess programs",
        "--model runs/NAME",
        f"{_OWN}.uci:main",
        f"{_OWN}.uci:UciConfig",
    ),
    "match": Command(
        "games of a model against an engine or a model",
        "runs/NAME --against rook-tiny",
        f"{_OWN}.match:main",
        f"{_OWN}.match:MatchConfig",
    ),
    "find-max": Command(
        "the largest batch that fits, by real steps",
        "--memory-limit 800MB",
        f"{_BENCH}:find_max",
        f"{_SETTINGS}:FindMax",
    ),
    "calculate": Command(
        "the largest batch for a card that is not there",
        "--gpu rtx4090",
        f"{_BENCH}:calculate",
        f"{_SETTINGS}:Calculator",
        level="WARNING",
    ),
    "sweep": Command(
        "one model at several batch sizes",
        "--batch-sizes 8 32",
        f"{_BENCH}:sweep",
        "grpo.workbench.sweep_settings:Sweep",
    ),
    "trl": Command(
        "what `trl grpo` runs, with a batch that fits",
        "--config grpo.yaml",
        f"{_OWN}.trl:main",
        f"{_OWN}.trl:parse",
    ),
    "report": Command(
        "a run or a sweep as one page", "runs/NAME", f"{_BENCH}:report", f"{_BENCH}:ReportConfig"
    ),
    "check": Command(
        "what this machine reaches, and what is switched off", "", f"{_BENCH}:check", f"{_SETTINGS}:Check"
    ),
}
"""All commands by name."""


def main() -> int:
    """`grpo-lean COMMAND …`, the installed command."""
    words = sys.argv[1:]
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return DONE if words else WRONG_USAGE
    name = words[0]
    if name not in COMMANDS:
        print(f"{name!r} is no command: give one of {', '.join(COMMANDS)}.", file=sys.stderr)
        return WRONG_USAGE
    sys.argv[:2] = [f"grpo-lean {name}"]
    return run(name)


def run(name: str) -> int:
    """One command with the words of `sys.argv`, from the start of a process; its exit status."""
    _speak_utf8()
    _prepare()
    if trouble := unsupported():
        print(f"error {trouble}", file=sys.stderr)
        return WRONG_USAGE
    set_library_defaults()
    return call(name)


def call(name: str) -> int:
    """The command itself; its exit status. What a person can mend is one line."""
    command, (process, _) = COMMANDS[name], launched_processes()
    try:
        from grpo.logs.screen import configure_logging, plain_console, print_error

        errors = plain_console(stderr=True, quiet=process > 0)  # one of several processes speaks for all
        try:
            configure_logging(command.level, errors, process=process)
            with redirect_stderr(io.StringIO()) if process else nullcontext():
                settings = _settings(command)
            console = plain_console(width=None if sys.stdout.isatty() else WIDTH)
            return _load(command.action)(settings, console) or DONE
        except Exception as error:
            from grpo.rewards import EngineError  # not before: chess takes a tenth of a second to load

            if not isinstance(error, UserError | EngineError):
                raise
            print_error(errors, error)
            return WRONG_USAGE
    except KeyboardInterrupt:
        return INTERRUPTED


def _settings(command: Command) -> Any:
    """Read what was typed. tyro ends the process at a wrong flag; a wrong value is a ValueError."""
    import tyro

    reader = _load(command.settings)
    if parse := getattr(reader, "parse", None):
        return parse()
    return tyro.cli(reader) if isinstance(reader, type) else reader()


def _load(place: str) -> Any:
    """Imports what MODULE:NAME names."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


def _speak_utf8() -> None:
    """Start Python again in its UTF-8 mode where a locale knows ASCII alone, as in a bare container.

    Names of files beyond ASCII could not be opened or written down otherwise, by us or by any library.
    """
    knows_ascii_only = lookup(sys.getfilesystemencoding()).name == "ascii"
    if knows_ascii_only and not sys.flags.ignore_environment and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


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
        "Train language models with GRPO: the batch always fits, and groups stay whole.",
        "",
        "usage: grpo-lean COMMAND [FLAGS]",
        "",
        *(f"  {name:<10} {it.what:<52} {it.example}".rstrip() for name, it in COMMANDS.items()),
        "",
        "grpo-lean COMMAND --help says more of each.",
    ]
    return "\n".join(lines)
