"""Curves as small SVG pictures, legible at the width of a phone.

Each is drawn 400 wide with letters 13 high, for a page that shows it between 340 and 440 pixels wide. Text
stays text. Left out: anything that would need a script, such as values under the pointer.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from grpo.workbench.report.page import Picture
from grpo.workbench.report.read import points
from grpo.workbench.sizes import Record

PALETTE = ("#1f5fa8", "#c2571a", "#2f7d4f", "#8a4a9e", "#9a7516", "#4b5b6b", "#b23a57", "#2a8c8c")
"""Told apart with any kind of sight, and dark enough for thin lines on white."""
INK, FAILED, _SOFT = "#1c2430", PALETTE[6], "#5a6675"
_PHASES = ("sample", "score", "learn", "update", "reward", "other", "wait", "reduce")
PHASE_COLORS = dict(zip(_PHASES, PALETTE, strict=True)) | {"all": INK}
_STYLE = {
    "figure.figsize": (400 / 72, 280 / 72), "figure.dpi": 72, "figure.constrained_layout.use": True,
    "svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 13, "font.family": "sans-serif",
    "text.color": INK, "axes.labelcolor": _SOFT, "axes.edgecolor": "#aab3bd", "axes.linewidth": 0.8,
    "xtick.color": _SOFT, "ytick.color": _SOFT, "axes.grid": True, "grid.color": "#e3e7ec",
    "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "lines.linewidth": 1.8, "lines.markersize": 5.5, "legend.frameon": False, "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2, "axes.formatter.useoffset": False,
}  # fmt: skip


class Curve(NamedTuple):
    """x and y of equal length, and how they look: matplotlib's "-" or "o-". low, high: of intervals."""

    x: Sequence[float]
    y: Sequence[float]
    look: str = "-"
    color: str | None = None
    low: Sequence[float] = ()
    high: Sequence[float] = ()


def curve(
    records: Sequence[Record], x: str, y: str, look: str = "-", *, unit: float = 1.0, color: str | None = None
) -> Curve:
    """The figures `x` and `y` (in so many `unit`s) of those records that have both.

    With intervals where all of these have their ends as well, which are named `y`/low and `y`/high.
    """
    rows, with_ends = points(records, x, y), points(records, x, y, f"{y}/low", f"{y}/high")
    xs, ys = ([row[place] for row in rows] for place in (0, 1))
    low, high = ([row[place] / unit for row in with_ends] for place in (2, 3))
    drawn = Curve(xs, [value / unit for value in ys], look, color)
    return drawn._replace(low=low, high=high) if len(with_ends) == len(rows) else drawn


def line(
    title: str,
    curves: Mapping[str, Curve],
    *,
    x: str,
    y: str,
    by_size: bool = False,
    zoom: bool = False,
    from_zero: bool = False,
    caption: str = "",
) -> Picture | None:
    """None where there is no point to draw.

    curves: by label; one that is "" or begins with _ stands in no legend. by_size: x are batch sizes, on a
    logarithmic axis that names them. zoom: leave out what lies above where curves are after a tenth of their
    length, as a loss's first fall hides the rest.
    """
    places = sorted({at for graph in curves.values() for at in graph.x})
    values = [value for graph in curves.values() for value in graph.y]
    if not places:
        return None
    with mpl.rc_context(_STYLE):
        axes = Figure().subplots()
        for index, (label, graph) in enumerate(curves.items()):
            if graph.x:
                _draw(axes, graph, f"curve-{index}", label, graph.color or PALETTE[index % len(PALETTE)])
        axes.set(xlabel=x, ylabel=y)
        axes.margins(x=0.04, y=0.1)
        if by_size:
            ticks = FixedLocator(places[:: -(-len(places) // 7)])
            axes.set_xscale("log", base=2)
            axes.xaxis.set(major_locator=ticks, major_formatter="{x:.0f}", minor_locator=NullLocator())
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=all(float(at).is_integer() for at in places)))
        for axis, largest in (
            (axes.xaxis, 0 if by_size else places[-1]),
            (axes.yaxis, max(map(abs, values))),
        ):
            if largest >= 10_000:
                axis.set_major_formatter(EngFormatter(sep=" "))
        late = [
            value for graph in curves.values() for at, value in zip(graph.x, graph.y, strict=True)
            if at >= min(places[-1] / 10, graph.x[-1])  # of one that ended before that, its end
        ]  # fmt: skip
        low, high = min(late), max(late)
        if zoom and max(values) - low > 2 * (high - low) > 0:
            axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
        if from_zero and min(values) >= 0:
            axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1e-9))
        return _picture(axes, title, caption)


def ramp(count: int) -> list[str]:
    """Colours from dark to light, for what has an order."""
    shades = mpl.colormaps["viridis"]([0.85 * place / max(1, count - 1) for place in range(count)])
    return [mpl.colors.to_hex(shade) for shade in shades]


def own_ids(svg: str, name: str) -> str:
    """The SVG with ids that no other picture of the page has."""
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{anchor(name)}-", svg)


def anchor(title: str) -> str:
    """A title as an id."""
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def _draw(axes: Any, graph: Curve, gid: str, label: str, color: str) -> None:
    size, is_line = (9 if graph.look == "x" else 5.5), graph.look in ("-", "--")
    (drawn,) = axes.plot(graph.x, graph.y, graph.look, color=color, label=label, markersize=size)
    drawn.set(gid=gid, markeredgewidth=size / 4)
    if len(graph.x) == 1 and is_line:
        drawn.set_marker("o")  # as a line of one point would not be seen
    if graph.low:
        axes.vlines(graph.x, graph.low, graph.high, colors=color, linewidth=1.2)


def _picture(axes: Any, title: str, caption: str) -> Picture:
    """With a legend below the axes, in as many columns as there is room for."""
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        columns = max(1, 50 // (max(map(len, labels)) + 5))  # letters of a row, 5 of them for the mark
        axes.figure.legend(loc="outside lower center", ncols=min(columns, len(labels)))
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    axes.figure.savefig(buffer, format="svg", metadata=nothing)
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", buffer.getvalue(), flags=re.DOTALL)
    return Picture(own_ids(svg[svg.index("<svg") :].strip(), title), caption, title)
