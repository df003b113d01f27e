"""Settings as people write them: a flat mapping in YAML, flags on the command line."""

import dataclasses
import difflib
import json
import reprlib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import tyro
import yaml
from loguru import logger

from grpo.config.limits import SettingsError
from grpo.config.settings import Config
from grpo.files import write_whole

T = TypeVar("T")
CONFIG_FILE = "config.yaml"
_WHOLE, _END = "# Settings of a run, up to the last line.", "# end"
"""The first line of what `write_yaml` writes, and the last."""
PROFILES = "profiles"
"""In a file: named sets of settings, of which `--profile` takes one."""


def to_flat(config: Config) -> dict[str, Any]:
    """Settings by name, as YAML can hold them."""
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            flat.update({inner.name: getattr(value, inner.name) for inner in dataclasses.fields(value)})
        else:
            flat[item.name] = value
    return {name: _plain(value) for name, value in flat.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def from_flat(values: Mapping[str, Any], base: Config | None = None) -> Config:
    """Settings from a flat mapping over `base`. SettingsError for a name that is none."""
    base = base or Config()
    known = to_flat(base)
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ": docs/settings.md and --help name them all."
            raise SettingsError(f"there is no setting {reprlib.repr(name)}{hint}")
    if values.get("gradient_checkpointing") == "selective":
        logger.info("gradient_checkpointing is auto: selective, of an older version, is no longer known")
        values = {**values, "gradient_checkpointing": "auto"}
    changes = _converted(base, values)
    for item in dataclasses.fields(base):
        part = getattr(base, item.name)
        if dataclasses.is_dataclass(part) and not isinstance(part, type):
            changes[item.name] = _build(partial(dataclasses.replace, part, **_converted(part, values)))
    return _build(partial(dataclasses.replace, base, **changes))


def _converted(settings: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of `values` that are fields of `settings`, as their types want them."""
    hints = get_type_hints(type(settings))
    return {name: _convert(name, value, hints[name]) for name, value in values.items() if name in hints}


def _convert(name: str, value: Any, hint: Any) -> Any:
    """`value` as YAML gave it, as a `hint`. SettingsError where it cannot be one."""
    options = get_args(hint)
    if get_origin(hint) is tuple:
        return tuple(
            _convert(name, item, options[0]) for item in (value if isinstance(value, list) else [value])
        )
    if get_origin(hint) is Literal:
        if isinstance(value, bool) and "off" in options:  # YAML reads a bare off as false
            value = "on" if value else "off"
        if value in options:
            return value
        raise SettingsError(f"{name} is {value!r}: give one of {', '.join(map(str, options))}.")
    if options:  # X | None, X | Literal[...]
        if value is None and type(None) in options:
            return None
        words = [word for option in options if get_origin(option) is Literal for word in get_args(option)]
        if value in words:
            return value
        try:
            return _convert(name, value, options[0])
        except SettingsError as error:
            raise SettingsError(" or ".join([str(error).rstrip("."), *words]) + ".") from None
    if hint is bool or isinstance(value, bool):
        good = hint is bool and isinstance(value, bool)
    elif hint is float:  # YAML reads 1e-5 as text: it wants 1.0e-5
        good = isinstance(value, int | float) or (isinstance(value, str) and _is_float(value))
    elif hint is str:  # and a name of digits, or bytes, as a number
        good = isinstance(value, str | int | float)
    else:
        good = isinstance(value, str if hint is Path else hint)
    if not good:
        raise SettingsError(f"{name} is {value!r}: give a value of type {hint.__name__}.")
    return hint(value)


def _is_float(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _build(make: Callable[[], T]) -> T:
    """What `make` returns; a setting it refuses becomes a SettingsError."""
    try:
        return make()
    except SettingsError:
        raise
    except ValueError as error:
        raise SettingsError(str(error)) from error


def read_yaml(path: Path) -> dict[str, Any]:
    """A flat mapping of settings. SettingsError if the file is not one."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.startswith(_WHOLE) and text.rstrip().rpartition("\n")[2] != _END:
            raise CutOff(f"config file {str(path)!r} was cut off: its last line, {_END!r}, is missing.")
        values = yaml.safe_load(text)
    except FileNotFoundError:
        raise SettingsError(f"config file {str(path)!r} does not exist.") from None
    except CutOff:
        raise
    except RecursionError:
        raise SettingsError(f"config file {str(path)!r} cannot be read: it is nested too deep.") from None
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise SettingsError(f"config file {str(path)!r} cannot be read: {where}{error.problem}.") from error
    except (OSError, yaml.YAMLError, ValueError) as error:  # a date in month 13 is a ValueError
        raise SettingsError(f"config file {str(path)!r} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"config file {str(path)!r} holds no settings: write lines like 'steps: 100'.")
    if strange := [key for key in values if not isinstance(key, str)]:
        raise SettingsError(f"config file {str(path)!r} has {strange[0]!r} where a setting's name belongs.")
    return values


class CutOff(SettingsError):
    """A file that `write_yaml` began, and whose end is not there."""


def write_yaml(config: Config, path: Path) -> None:
    """Whole or not at all, whatever happens on the way: what was there stays until it is replaced."""
    write_whole(path, f"{_WHOLE}\n{yaml.safe_dump(to_flat(config), sort_keys=False)}{_END}\n")


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
    """Those of the newest checkpoint that has some, and where that is."""
    for state in sorted(folder.glob("checkpoints/step-*/trainer.json"), reverse=True):
        try:
            settings = json.loads(state.read_text())["settings"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if isinstance(settings, dict):
            return settings, state.parent
    return {}, None


def read_config(path: Path, profile: str | None = None, base: Config | None = None) -> Config:
    """A file's settings over `base`, with those of one of its profiles. SettingsError for what is wrong."""
    return from_flat(choose_profile(read_yaml(path), profile, path), base)


def choose_profile(values: Mapping[str, Any], profile: str | None, path: Path) -> dict[str, Any]:
    """A file's settings; where it holds profiles, those of one of them over what stands beside them.

    SettingsError for a profile that is not there, and for profiles of which none is chosen.
    """
    shared = {name: value for name, value in values.items() if name != PROFILES}
    if PROFILES not in values:
        if profile is not None:
            raise SettingsError(
                f"profile is {profile!r}, but config file {str(path)!r} has none: leave it out, or write "
                "profiles under 'profiles:'."
            )
        return shared
    profiles = values[PROFILES]
    if not (isinstance(profiles, dict) and profiles and all(map(_is_mapping, profiles.values()))):
        raise SettingsError(
            f"profiles in config file {str(path)!r} are no named settings: write a name below "
            "'profiles:', and below that lines like 'batch_size: 64'."
        )
    named = {str(name): settings for name, settings in profiles.items()}
    if profile is None:
        raise SettingsError(
            f"config file {str(path)!r} holds profiles: choose one with --profile, of {', '.join(named)}."
        )
    if profile not in named:
        near = difflib.get_close_matches(profile, named, n=1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise SettingsError(
            f"profile is {profile!r}, which is none of config file {str(path)!r}: {hint}"
            f"There are {', '.join(named)}."
        )
    return {**shared, **(named[profile] or {})}


def _is_mapping(value: Any) -> bool:
    return value is None or isinstance(value, dict)  # None: a profile that only has what is shared


def parse_command_line(arguments: Sequence[str] | None = None) -> Config:
    """Settings from `--config FILE [--profile NAME]` or the run named by `--resume`, overridden by flags."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if {"-h", "--help"} & set(arguments):
        from grpo.config.help import help_text  # which reads these

        print(help_text(Path(sys.argv[0]).name))  # noqa: T201
        sys.exit(0)
    base = Config()
    resumed, _ = _take_option(arguments, "--resume")
    if resumed and not _is_file(Path(resumed) / CONFIG_FILE):
        raise SettingsError(
            f"resume is {resumed!r}, which is no run folder: give one that holds a {CONFIG_FILE}."
        )
    name, _ = _take_option(arguments, "--name")
    if resumed and name not in (None, Path(resumed).name):
        raise SettingsError(
            f"name is {name!r}, but resume is {resumed!r}: a run goes on in its own folder; leave --name out."
        )
    if resumed:
        stored = read_run_settings(Path(resumed))
        base = from_flat({**stored, "resume": resumed}, base)
    base, rest = take_config(arguments, base)
    return tyro.cli(
        Config,
        args=rest,
        default=base,
        config=(tyro.conf.OmitArgPrefixes,),
    )


def take_config(arguments: Sequence[str], base: Config) -> tuple[Config, list[str]]:
    """`base` with the settings of `--config FILE [--profile NAME]` over it, and the arguments without these.

    SettingsError for what is wrong with them.
    """
    file, rest = _take_option(list(arguments), "--config")
    profile, rest = _take_option(rest, "--profile")
    if profile is not None and not file:
        raise SettingsError(f"profile is {profile!r}, which wants a file to be in: add --config FILE.yaml.")
    return (read_config(Path(file), profile, base) if file else base), rest


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or has a null byte
        return False


def _take_option(arguments: list[str], option: str) -> tuple[str | None, list[str]]:
    """The value of `option VALUE` or `option=VALUE`, and the arguments without it."""
    for index, argument in enumerate(arguments):
        if argument == option and index + 1 < len(arguments):
            return arguments[index + 1], arguments[:index] + arguments[index + 2 :]
        if argument.startswith(f"{option}="):
            return argument.partition("=")[2], arguments[:index] + arguments[index + 1 :]
    return None, arguments
