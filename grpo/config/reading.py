"""Settings as people write them: YAML, and flags on the command line."""

import difflib
import json
import reprlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from os.path import isfile
from pathlib import Path
from types import NoneType
from typing import Any

import tyro
import yaml
from loguru import logger

from grpo.config.limits import SettingsError
from grpo.config.settings import Config
from grpo.files import write_whole

CONFIG_FILE = "config.yaml"
_WHOLE, _END = "# Settings of a run, up to the last line.", "# end"
"""The first line of what `write_yaml` writes, and the last."""
PROFILES = "profiles"
"""In a file: named sets of settings, of which `--profile` takes one."""


def to_plain(config: Config) -> dict[str, Any]:
    """Settings by name, as YAML and JSON can hold them."""
    values = {item.name: getattr(config, item.name) for item in fields(config)}
    plain: dict[str, Any] = json.loads(json.dumps(values, default=str))  # tuples are lists, paths are text
    return plain


def from_plain(values: Mapping[str, Any], base: Config | None = None) -> Config:
    """Settings by name as a file has them, over `base`, and of its class. SettingsError for what is none."""
    base = base or Config()
    names = [item.name for item in fields(base)]
    for name in values:
        if name not in names:
            hint = f"{_near(name, names)}docs/settings.md and --help name them all."
            raise SettingsError(f"there is no setting {reprlib.repr(name)}. {hint}")
    if values.get("gradient_checkpointing") == "selective":
        logger.info("gradient_checkpointing is auto: selective, of an older version, is no longer known")
        values = {**values, "gradient_checkpointing": "auto"}
    return replace(base, **values)


def _near(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {near[0]!r}? " if near else ""


def read_yaml(path: Path) -> dict[str, Any]:
    """A flat mapping of settings. SettingsError if the file is not one."""
    file = f"config file {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8-sig")
        is_cut = text.startswith(_WHOLE) and text.rstrip().rpartition("\n")[2] != _END
        values = None if is_cut else yaml.load(text, Loader=_UniqueKeys)  # a safe one
    except FileNotFoundError:
        raise SettingsError(f"{file} does not exist.") from None
    except RecursionError:
        raise SettingsError(f"{file} cannot be read: it is nested too deep.") from None
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise SettingsError(f"{file} cannot be read: {where}{error.problem}.") from error
    except (OSError, yaml.YAMLError, ValueError) as error:  # a date in month 13 is a ValueError
        raise SettingsError(f"{file} cannot be read: {error}") from error
    if is_cut:
        raise CutOff(f"{file} was cut off: its last line, {_END!r}, is missing.")
    if not isinstance(values, dict):
        raise SettingsError(f"{file} holds no settings: write lines like 'steps: 100'.")
    if strange := [key for key in values if not isinstance(key, str)]:
        raise SettingsError(f"{file} has {strange[0]!r} where a setting's name belongs.")
    return values


class _UniqueKeys(yaml.SafeLoader):
    """Reads YAML as `safe_load` does, and refuses a key that stands twice (YAML 1.2, section 3.2.1.1)."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    problem = f"{key.value!r} stands twice: leave one of the two out"
                    raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


class CutOff(SettingsError):
    """A file that `write_yaml` began, and whose end is not there."""


def write_yaml(config: Config, path: Path) -> None:
    """Writes settings whole or not at all: what was there stays until it is replaced."""
    write_whole(path, f"{_WHOLE}\n{yaml.safe_dump(to_plain(config), sort_keys=False)}{_END}\n")


def read_run_settings(folder: Path) -> dict[str, Any]:
    """The settings of a run in `folder`; what that file lacks, as its newest checkpoint has it."""
    saved, where = _saved_settings(folder)
    try:
        settings = read_yaml(folder / CONFIG_FILE)
    except CutOff as error:
        if not saved:
            remedy = "No checkpoint has a copy: write it again with its last line, or start anew."
            raise SettingsError(f"{error} {remedy}") from None
        logger.warning("{} Its settings are taken from {}.", error, where)
        return saved
    if missing := [name for name in saved if name not in settings]:
        logger.warning("{} lacks {}: taken from {}", folder / CONFIG_FILE, ", ".join(missing), where)
    return {**saved, **settings}


def _saved_settings(folder: Path) -> tuple[dict[str, Any], Path | None]:
    """The settings of the newest checkpoint that has some, and where that is."""
    for state in sorted(folder.glob("checkpoints/step-*/trainer.json"), reverse=True):
        try:
            settings = json.loads(state.read_text(encoding="utf-8"))["settings"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(settings, dict):
            return settings, state.parent
    return {}, None


def read_config(path: Path, profile: str | None = None, base: Config | None = None) -> Config:
    """A file's settings over `base`; where it holds profiles, those of one over what stands beside them.

    SettingsError for what is wrong, a profile that is not there, and profiles of which none is chosen.
    """
    values, file = read_yaml(path), f"config file {str(path)!r}"
    if PROFILES not in values:
        if profile is not None:
            raise SettingsError(f"profile is {profile!r}, but {file} has none: leave it out.")
        return from_plain(values, base)
    profiles = values.pop(PROFILES)
    if not isinstance(profiles, dict) or not profiles or {*map(type, profiles.values())} - {dict, NoneType}:
        hint = "write a name below 'profiles:', and below that lines like 'batch_size: 64'."
        raise SettingsError(f"profiles in {file} are no named settings: {hint}")
    by_name = {str(name): part or {} for name, part in profiles.items()}  # none: only what is shared
    if profile is None:
        raise SettingsError(f"{file} holds profiles: choose one with --profile, of {', '.join(by_name)}.")
    if profile not in by_name:
        hint = f"{_near(profile, by_name)}There are {', '.join(by_name)}."
        raise SettingsError(f"profile is {profile!r}, which is none of {file}: {hint}")
    return from_plain({**values, **by_name[profile]}, base)


def parse_command_line(arguments: Sequence[str] | None = None) -> Config:
    """Settings from `--config FILE [--profile NAME]` or the run named by `--resume`, overridden by flags."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        from grpo.config.help import help_text  # which reads these

        print(help_text(Path(sys.argv[0]).name))  # noqa: T201
        sys.exit(0)
    resumed, _ = take_option(arguments, "--resume")
    name, _ = take_option(arguments, "--name")
    stored: dict[str, Any] = {}
    if resumed:
        if not isfile(Path(resumed) / CONFIG_FILE):
            hint = f"give one that holds a {CONFIG_FILE}."
            raise SettingsError(f"resume is {resumed!r}, which is no run folder: {hint}")
        if name not in (None, Path(resumed).name):
            raise SettingsError(
                f"name is {name!r}, but resume is {resumed!r}, which has one: leave --name out."
            )
        stored = {**read_run_settings(Path(resumed)), "resume": resumed}
    base, rest = take_config(arguments, from_plain(stored))
    return tyro.cli(Config, args=rest, default=base)


def take_config(arguments: Sequence[str], base: Config) -> tuple[Config, list[str]]:
    """`base` with `--config FILE [--profile NAME]` over it, and the arguments without these."""
    file, rest = take_option(list(arguments), "--config")
    profile, rest = take_option(rest, "--profile")
    if profile is not None and not file:
        raise SettingsError(f"profile is {profile!r}, which wants a file to be in: add --config FILE.yaml.")
    return (read_config(Path(file), profile, base) if file else base), rest


def take_option(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of `option VALUE` or `option=VALUE`, and the arguments without it."""
    for index, argument in enumerate(arguments):
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1], arguments[:index] + arguments[index + 2 :]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2], arguments[:index] + arguments[index + 1 :]
    return None, arguments
