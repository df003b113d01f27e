"""Limits of single settings, as annotations on their fields: `steps: Annotated[int, at_least(1)] = 100`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints


class SettingsError(ValueError):
    """A setting that cannot be: names it, its value, and what to do."""


@dataclass(frozen=True)
class Limit:
    """Which values a setting may have, and what to give instead of another."""

    holds: Callable[[Any], bool]
    remedy: str


def at_least(least: float, remedy: str = "") -> Limit:
    """Of a finite number."""
    return Limit(lambda value: least <= value < math.inf, remedy or f"give at least {least}")


NOT_NEGATIVE = at_least(0, "give 0 or more")
POSITIVE = Limit(lambda value: value > 0, "give more than 0, or leave it out")
COUNT = at_least(1)
SHARE = Limit(lambda value: 0 <= value <= 1, "give a share between 0 and 1")
ROWS = at_least(1, "give at least 1, or leave it out for all rows")
DECAY = Limit(lambda value: 0 <= value < 1, "give at least 0 and less than 1")


def check_limits(settings: Any) -> None:
    """SettingsError for the first field of a dataclass beyond its limit. None, and words, have none."""
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        if get_origin(hint) is not Annotated:
            continue
        value, (kind, *remarks) = getattr(settings, name), get_args(hint)
        if value is None or value in _words(kind):
            continue
        for limit in remarks:
            if isinstance(limit, Limit) and not limit.holds(value):
                raise SettingsError(f"{name} is {value}: {limit.remedy}.")


def _words(kind: Any) -> list[str]:
    return [word for option in get_args(kind) if get_origin(option) is Literal for word in get_args(option)]
