"""`grpo-lean trl --config grpo.yaml`: what `trl grpo --config grpo.yaml` runs, and its batch fits.

TRL's own script does everything: its flags, its file, datasets, PEFT, quantization, trackers, the hub. It
only finds another class under the name `GRPOTrainer`. Flags of `accelerate launch` start more processes,
as there.
"""

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from loguru import logger

from grpo.commands import run
from grpo.config.reading import read_yaml, take_option
from grpo.config.sizes import parse_size
from grpo.errors import UserError


class Words(NamedTuple):
    """The command line, parsed."""

    parsed: tuple[Any, ...]
    """TRL's own settings: of the script, of training, of the model, of datasets."""
    ours: dict[str, Any]
    """Arguments that our trainer takes besides TRL's."""
    to_launch: list[str]
    """Words for `accelerate launch`, where more processes are asked for."""
    others: list[str]
    """All the other words."""
    dry_run: bool = False
    """Whether to plan and not to train."""
    device_memory: int | None = None
    """The memory of a card that is not there, to plan for."""


def _own_parser() -> argparse.ArgumentParser:
    """The flags that are ours, beside TRL's."""
    parser = argparse.ArgumentParser(prog="grpo-lean trl", add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("of grpo-lean")
    group.add_argument(
        "--memory_utilization",
        "--memory-utilization",
        type=float,
        default=0.85,
        help="share of the device that may be held (default: 0.85)",
    )
    group.add_argument(
        "--memory_limit",
        "--memory-limit",
        default=None,
        help="the most that may be held, such as 20GB (default: no limit)",
    )
    for name, meaning in (
        ("skip_zero_variance", "leave groups of equal rewards out of learning"),
        ("dry_run", "say what fits and in how many rows, and do not train"),
    ):
        group.add_argument(
            f"--{name}",
            f"--{name.replace('_', '-')}",
            nargs="?",
            const="true",
            default="false",
            type=str.lower,
            choices=("true", "false"),
            metavar="",
            help=meaning,
        )
    group.add_argument(
        "--device_memory",
        "--device-memory",
        default=None,
        help="with --dry-run: plan for a card that is not there, such as 24GB",
    )
    parser.add_argument("--launched", action="store_true", help=argparse.SUPPRESS)  # by accelerate, of `main`
    return parser


def parse(words: Sequence[str] | None = None) -> Words:
    """Parses `sys.argv`, or `words`. ValueError where TRL is missing, and for a size that is none.

    TRL's parser ends the process for flags that are wrong.
    """
    words = list(sys.argv[1:] if words is None else words)
    parser = _own_parser()
    if {"-h", "--help"} & {*words}:
        print(parser.format_help().partition("\n\n")[2])
    trl_parser = _script().make_parser(prog="grpo-lean trl")
    typed_here, theirs = parser.parse_known_args(words)
    if typed_here.device_memory:  # of a card that is not there, whose settings may be
        theirs += ["--use_cpu", "True", "--tf32", "False"]
    file, _ = take_option(list(theirs), "--config")
    if file is not None and Path(file).is_file():
        read_yaml(Path(file))  # which refuses a key that stands twice; TRL takes the last one's value
    *parsed, in_file, typed = trl_parser.parse_args_and_config(
        theirs, return_remaining_strings=True, separate_remaining_strings=True
    )  # both of what TRL does not know
    ours = vars(parser.parse_known_args([*in_file, *words])[0])  # what was typed comes last, and counts
    plans = ours.pop("dry_run") == "true"
    ours["skip_zero_variance"] = ours["skip_zero_variance"] == "true"
    if (absent := ours.pop("device_memory")) and not plans:
        raise UserError(f"device_memory is {absent}, of a card that is not there: add --dry-run.")
    if ours["memory_limit"] is not None:
        ours["memory_limit"] = parse_size(ours["memory_limit"])
    to_launch = [] if ours.pop("launched") else [*parser.parse_known_args(in_file)[1], *typed]
    unknown = list(typed)
    others = [word for word in words if not (unknown and word == unknown[0] and unknown.pop(0))]
    device_memory = parse_size(absent) if absent else None
    return Words(tuple(parsed), ours, to_launch, others, plans, device_memory)


def main(words: Words, console: object = None) -> None:
    """Trains as the script does, in this process or in those that accelerate starts; or says what fits."""
    if words.dry_run:
        _plan(words, console)
        return
    if words.to_launch:
        from accelerate.commands.launch import launch_command, launch_command_parser
        from trl.cli.accelerate_config import resolve_accelerate_config_argument

        flags = resolve_accelerate_config_argument(words.to_launch)
        module = ["--module", "grpo.commands.trl", "--launched", *words.others]
        launch_command(launch_command_parser().parse_args([*flags, *module]))
        return
    import trl

    GRPOTrainer = _ours().GRPOTrainer
    theirs = trl.GRPOTrainer
    trl.GRPOTrainer = partial(GRPOTrainer, **words.ours)  # which the script imports when it begins
    try:
        _script().main(*words.parsed)
    finally:
        trl.GRPOTrainer = theirs


def _plan(words: Words, console: Any) -> None:
    """Plans for one process, as all do the same unless they share the model."""
    _ours()
    if words.to_launch and _are_sharding(words.to_launch):
        logger.info("processes share the model: the first step will tell how many rows fit")
        return
    from grpo.trl.dry_run import dry_run

    dry_run(_script().main, words.parsed, words.ours, console, words.device_memory)


def _are_sharding(to_launch: list[str]) -> bool:
    from accelerate.commands.config import load_config_from_file
    from accelerate.commands.launch import launch_command_parser
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    flags = resolve_accelerate_config_argument(to_launch)
    launch = launch_command_parser().parse_args([*flags, "script"])
    file = load_config_from_file(launch.config_file) if launch.config_file else None
    kind = file.distributed_type if file else ""
    return launch.use_fsdp or launch.use_deepspeed or str(kind).split(".")[-1] in ("FSDP", "DEEPSPEED")


def _ours() -> Any:
    try:
        return import_module("grpo.trl")
    except ImportError as error:  # of a TRL that is too old
        raise UserError(str(error)) from error


def _script() -> Any:
    try:
        return import_module("trl.scripts.grpo")
    except ImportError as error:
        raise UserError(f"grpo-lean trl needs TRL, 1.10 or newer: pip install trl ({error}).") from error


if __name__ == "__main__":
    sys.exit(run("trl"))
