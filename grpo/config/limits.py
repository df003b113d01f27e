"""Limits of settings, as annotations on their fields: `steps: Annotated[int, at_least(1)] = 100`.

Settings are read and checked in one way, wherever they come from: Python, a file, or the command line.
"""

import math
import reprlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from os.path import expanduser, expandvars
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, NamedTuple, Self, get_args, get_origin, get_type_hints

from grpo.config.sizes import is_size
from grpo.errors import UserError


class SettingsError(UserError):
    """A setting that cannot be: names it, its value, and what to do."""


@dataclass(frozen=True)
class Limit:
    """Which values a setting may have, and what to give instead of another."""

    holds: Callable[[Any], Any]
    remedy: str


def at_least(least: float, remedy: str = "") -> Limit:
    """Returns the limit of a finite number that is at least so large."""
    return Limit(lambda value: least <= value < math.inf, remedy or f"give at least {least}")


NOT_NEGATIVE = at_least(0, "give 0 or more")
POSITIVE = Limit(lambda value: value > 0, "give more than 0, or leave it out")
COUNT = at_least(1)
SHARE = Limit(lambda value: 0 <= value <= 1, "give a share between 0 and 1")
PART = Limit(lambda value: 0 < value <= 1, "give a share above 0 and up to 1")
ROWS = at_least(1, "give at least 1, or leave it out for all rows")
DECAY = Limit(lambda value: 0 <= value < 1, "give at least 0 and less than 1")
SIZE = Limit(is_size, "that is no size, write it like 24GB or 512MB")
FINITE = Limit(lambda numbers: all(map(math.isfinite, numbers)), "give finite numbers")
BY_KIND: dict[Any, Limit] = {
    float: Limit(lambda value: not 1e30 <= abs(value) < math.inf, "give a number below 1e30"),
    int: Limit(lambda value: abs(value) < 2**31, "give a number below 2^31"),
    (str, Path): Limit(
        lambda value: all(len(part.encode(errors="replace")) < 256 for part in Path(value).parts),
        "a disk takes names of up to 255 letters, give a shorter one",
    ),
    Path: Limit(
        lambda value: not any(part.startswith("$") for part in value.parts),
        "there is no such variable in the environment, set it or write the whole path",
    ),
}
"""Limits of all settings of a run, by type: numbers that single precision has room for, counts, names."""
OF_ANY_SIZE = ("seed", "system_prompt")

_MADE_OF: dict[Any, tuple[Any, Callable[[Any], Any]]] = {
    bool: (bool, bool),
    int: (Integral, int),
    float: (Real | str, float),
    str: (str | int | float | Path, str),
    Path: (str | Path, lambda value: Path(expanduser(expandvars(value)))),
}
"""By type of a setting, what it is made of: to YAML 1e-5 is text, and a name of digits a number."""


class Values(NamedTuple):
    """Which values an annotation lets a setting have."""

    kinds: tuple[Any, ...] = ()
    words: tuple[Any, ...] = ()
    """Single values besides: those of a Literal, and None."""
    limits: tuple[Limit, ...] = ()
    is_tuple: bool = False
    """Whether there are several, each of which is one of the kinds or words."""

    @property
    def choices(self) -> str:
        return ", ".join(word for word in self.words if word is not None)


@cache
def values_of(settings: Any) -> dict[str, Values]:
    """Returns the values that each field of a dataclass may have, by its name."""
    hints = get_type_hints(settings, include_extras=True)
    return {item.name: _values(hints[item.name]) for item in fields(settings)}


def _values(hint: Any) -> Values:
    origin, options = get_origin(hint), get_args(hint)
    if origin is Annotated:
        limits = [remark for remark in hint.__metadata__ if isinstance(remark, Limit)]
        return _values(options[0])._replace(limits=tuple(limits))
    if origin is tuple:
        return _values(options[0])._replace(is_tuple=True)
    if origin is Literal:
        return Values(words=options)
    if options:  # X | Y
        parts = [_values(option) for option in options]
        return Values(sum((part.kinds for part in parts), ()), sum((part.words for part in parts), ()))
    return Values(words=(None,)) if hint is NoneType else Values(kinds=(hint,))


def check_limits(settings: Any) -> None:
    """Make each field of a dataclass what it has to be. SettingsError for the first that cannot be that."""
    for name, allowed in values_of(settings.__class__).items():
        value = _read(name, getattr(settings, name), allowed)
        object.__setattr__(settings, name, value)
        if value not in allowed.words:
            _check(name, value, allowed.limits)


def _read(name: str, value: Any, allowed: Values) -> Any:
    if allowed.is_tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_read(name, item, allowed._replace(is_tuple=False)) for item in items)
    if isinstance(value, bool) and "off" in allowed.words:  # YAML reads a bare off as false
        value = "on" if value else "off"
    if value in allowed.words:
        return value
    if not allowed.kinds:
        raise SettingsError(f"{name} is {reprlib.repr(value)}: give one of {allowed.choices}.")
    (kind,) = allowed.kinds
    takes, make = _MADE_OF.get(kind, (object, lambda value: value))
    if isinstance(value, takes) and (kind is bool or not isinstance(value, bool)):
        with suppress(ValueError, OverflowError):
            return make(value)
    options = kind.__name__ + (f" or {allowed.choices}" if allowed.choices else "")
    raise SettingsError(f"{name} is {reprlib.repr(value)}: give a value of type {options}.")


def _check(name: str, value: Any, limits: Iterable[Limit]) -> None:
    for limit in limits:
        if not limit.holds(value):
            shown = list(value) if isinstance(value, tuple) else value
            raise SettingsError(f"{name} is {shown!r}: {limit.remedy}.")


@dataclass(frozen=True)
class Settings:
    """The base of all groups of settings, which are checked where they are made, alone or together."""

    def __post_init__(self) -> None:
        check_limits(self)
        for name, value in vars(self).items():
            if name not in OF_ANY_SIZE:
                _check(name, value, (BY_KIND[kind] for kind in BY_KIND if isinstance(value, kind)))
        for message in self.conflicts():
            raise SettingsError(message)

    def conflicts(self) -> Iterator[str]:
        """Yields the settings that do not go together, and what to give instead; each group adds its own."""
        yield from ()

    @classmethod
    def of(cls, settings: "Settings", **changes: Any) -> Self:
        """This group alone, of settings that have it among others, whose rules it need not keep."""
        return cls(**{item.name: getattr(settings, item.name) for item in fields(cls)} | changes)
