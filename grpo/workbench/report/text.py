"""Figures and names as text, and records of them as rows of tables."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from grpo.memory.budget import readable
from grpo.workbench.sizes import Record, figure

NOTHING = "–"
"""Stands where nothing was measured."""


class Fact(NamedTuple):
    """A figure that answers a question, how sure it is, and what to mind."""

    what: str
    value: str
    interval: str = ""
    note: str = ""


def number(value: float) -> str:
    """Four significant digits, 2.345 or 3e-05; what is whole or large is written out: 1,234."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 10_000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """0.012 s, 4.2 s, 2 min 4 s, 1 h 5 min."""
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def mean(value: float) -> str:
    """For losses and rewards, whose points should stand below each other."""
    return f"{value:.3f}"


_FORMS: Mapping[str, Callable[[float], str]] = {
    **dict.fromkeys(("final_heldout", "best_heldout", "final_train", "gap", "behind"), mean),
    **dict.fromkeys(("seconds", "start_s"), duration),
    **dict.fromkeys(("before", "after"), "{:.1f}".format),
    "change": "{:+.1f}".format,
}
"""How figures are written, by their names."""


def show(value: object, name: str = "") -> str:
    """A value as people read it; `NOTHING` for None."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return " ".join(show(item, name) for item in value) or "none"
    if not isinstance(value, int | float):
        return str(value)
    if name.endswith("_bytes"):
        return readable(value)
    return mean(value) if name.startswith("eval_") else _FORMS.get(name, number)(value)


def show_interval(record: Record, name: str) -> str:
    """0.741 to 0.835, the 95 % interval of a figure; "" where its ends are not known."""
    value, low, high = (figure(record, key) for key in (name, f"{name}/low", f"{name}/high"))
    return "" if None in (value, low, high) else f"{show(low, name)} to {show(high, name)}"


def show_figure(record: Record, name: str) -> str:
    """0.788 (0.741 to 0.835), or without what is in brackets."""
    interval = show_interval(record, name)
    return show(record.get(name), name) + (f" ({interval})" if interval else "")


def rows(records: Sequence[Record], columns: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Figures of records by heading. columns: their names; one of which nothing is known is left out."""
    known = {name: name for record in records for name in record if record[name] is not None}
    columns = columns or known
    return [
        {heading: show_figure(record, name) for heading, name in columns.items() if name in known}
        for record in records
    ]


def setting_rows(settings: Record) -> list[dict[str, str]]:
    """A row for each setting; settings within settings go by both names."""
    flat: dict[str, object] = {}
    for name, value in settings.items():
        inner = {f"{name}: {key}": item for key, item in value.items()} if isinstance(value, dict) else {}
        flat |= inner or {name: value}
    return [{"setting": name, "value": show(value, name)} for name, value in flat.items()]


def anchor(title: str) -> str:
    """A title as an id."""
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())
