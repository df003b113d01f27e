"""Figures as people read them; bytes are `grpo.memory.budget.readable`."""

from collections.abc import Callable

from grpo.memory.budget import readable

NOTHING = "–"
"""What stands where nothing was measured."""


def number(value: float, digits: int = 4) -> str:
    """`digits` significant digits: 2.345 or 3e-05; what is whole or larger is written out: 1,234."""
    whole = float(value).is_integer() or abs(value) >= 10**digits
    return f"{value:,.0f}" if whole else f"{value:.{digits}g}"


def fixed(value: float) -> str:
    """For losses and rewards, whose points should stand below each other."""
    return f"{value:.3f}"


def duration(seconds: float) -> str:
    """0.012 s, 4.2 s, 2 min 4 s, 1 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def cell(value: float | None, how: Callable[[float], str] = number) -> str:
    return NOTHING if value is None else how(value)


def between(low: float, high: float) -> str:
    """An interval."""
    return f"{fixed(low)} to {fixed(high)}"


def setting(name: str, value: object) -> str:
    """A setting's value, as a person would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return " ".join(setting(name, item) for item in value) or "none"
    if isinstance(value, int | float):
        return readable(value) if name.endswith("_bytes") else number(value)
    return "none" if value is None else str(value)
