"""Figures as people read them: numbers, times, bytes, lists."""

from collections.abc import Callable, Iterable

from grpo.memory.budget import readable

NOTHING = "–"
"""What stands in a table where nothing was measured."""


def number(value: float, digits: int = 4) -> str:
    """`digits` significant digits: 1,234 or 2.345 or 3e-5; whole numbers are written out."""
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) < 1e-3:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return f"{mantissa}e{int(exponent)}"
    text = f"{value:,.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}"
    return text.rstrip("0").rstrip(".") if "." in text and abs(value) >= 10 ** (digits - 1) else text


def short(value: float) -> str:
    """Three significant digits."""
    return number(value, 3)


def rounded(value: float) -> str:
    """Large counts by thousands and millions: 512, 1.5 k, 2.0 M."""
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.1f} {name}"
    return number(value)


def fixed(value: float) -> str:
    """Three decimals: for columns of losses and rewards, where the points should stand below each other."""
    return f"{value:.3f}"


def duration(seconds: float) -> str:
    """0.012 s, 4.2 s, 2 min 4 s, 1 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def share(value: float) -> str:
    """0.123 as 12 %."""
    return f"{value:.0%}".replace("%", " %")


def listed(items: Iterable[object]) -> str:
    """a; a and b; a, b and c."""
    words = [str(item) for item in items]
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def sizes(batch_sizes: Iterable[int]) -> str:
    """size 8; sizes 8 and 16."""
    words = [str(size) for size in batch_sizes]
    return f"size{'s' * (len(words) > 1)} {listed(words)}"


def plural(count: int, noun: str) -> str:
    """1 step, 2 steps."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def cell(value: float | None, how: Callable[[float], str] = number) -> str:
    """A table's cell."""
    return NOTHING if value is None else how(value)


def size_cell(value: float | None) -> str:
    """Bytes in a table's cell."""
    return cell(value, readable)


def value_text(value: object) -> str:
    """A setting's value, as a person would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, int | float):
        return number(value)
    return "none" if value is None else str(value)
