"""Curves and points as small SVG pictures, legible at the width of a phone.

Each is drawn 400 wide with letters 13 high, for a page that shows it between 340 and 440 pixels wide. Text
stays text. Left out: anything that would need a script, such as values under the pointer.
"""

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib as mpl
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullFormatter, NullLocator

from grpo.workbench.report.sections import Figure

WIDTH, HEIGHT = 400, 280
"""In units of which a letter is 13 high."""
PALETTE = ("#1f5fa8", "#c2571a", "#2f7d4f", "#8a4a9e", "#9a7516", "#4b5b6b", "#b23a57", "#2a8c8c")
"""Told apart with any kind of sight, and dark enough for thin lines on white."""
PHASE_COLORS = {
    "sample": 0, "score": 1, "learn": 2, "update": 3, "reward": 4, "wait": 6, "reduce": 7,
}  # fmt: skip
INK, SOFT, GRID = "#1c2430", "#5a6675", "#e3e7ec"
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 13, "font.family": "sans-serif",
    "text.color": INK, "axes.labelcolor": SOFT, "axes.edgecolor": "#aab3bd", "axes.linewidth": 0.8,
    "xtick.color": SOFT, "ytick.color": SOFT, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "lines.linewidth": 1.8,
    "legend.frameon": False, "legend.fontsize": 13, "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2, "axes.formatter.useoffset": False,
}  # fmt: skip
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}
_MOST_TICKS = 7
_LEGEND_LETTERS = 50
"""Of a row, with 5 for each line or mark."""
Look = Literal["line", "dots", "both", "dashed", "crosses", "rings"]


@dataclass(frozen=True)
class Curve:
    """What is drawn together: (x, y) of equal length, perhaps with a band from low to high."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    look: Look = "line"
    color: str | None = None
    tags: Sequence[str] = ()
    """A word beside each point."""


_LOOKS: Mapping[Look, Mapping[str, Any]] = {
    "line": {},
    "dots": {"linestyle": "", "marker": "o", "markersize": 6},
    "both": {"marker": "o", "markersize": 5},
    "dashed": {"linestyle": (0, (4, 3)), "linewidth": 1.4},
    "crosses": {"linestyle": "", "marker": "x", "markersize": 8, "markeredgewidth": 2},
    "rings": {"linestyle": "", "marker": "o", "markersize": 13, "markerfacecolor": "none"},
}


def ramp(count: int) -> list[str]:
    """Colours from dark to light, for what has an order."""
    shades = mpl.colormaps["viridis"]([0.85 * index / max(1, count - 1) for index in range(count)])
    return [mpl.colors.to_hex(shade) for shade in shades]


def draw(
    name: str,
    title: str,
    curves: Sequence[Curve],
    *,
    x: str,
    y: str,
    caption: str = "",
    sizes: Sequence[int] = (),
    limit: tuple[float, str] | None = None,
    zoom: bool = False,
    from_zero: bool = False,
) -> list[Figure]:
    """One picture in a list, or [] where there is no point to draw.

    x, y: what the axes show. sizes: batch sizes, for a logarithmic horizontal axis that names them.
    limit: a level with its name. zoom: leave out what lies above where curves are after a tenth of
    their length, as a loss's first fall hides the rest.
    """
    curves = [curve for curve in curves if len(curve.x)]
    if not curves:
        return []
    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, layout="constrained")
        axes = canvas.add_subplot()
        for index, curve in enumerate(curves):
            _draw_curve(axes, curve, index)
        if limit is not None:
            axes.axhline(limit[0], color=INK, linewidth=1, linestyle=(0, (1, 2)), label=limit[1])
        axes.set(xlabel=x, ylabel=y)
        _set_axes(axes, curves, sizes, zoom=zoom, from_zero=from_zero)
        handles, labels = axes.get_legend_handles_labels()
        if labels:
            _legend(canvas, handles, labels)
        return [Figure(name, title, _svg(canvas, name), caption)]


def stack(
    name: str, title: str, steps: Sequence[float], layers: Mapping[str, Sequence[float]], *, y: str
) -> list[Figure]:
    """Layers on top of each other over steps, each (steps,); [] where there are none."""
    if not steps or not layers:
        return []
    with mpl.rc_context(_STYLE):
        canvas = Canvas(figsize=(WIDTH / 72, HEIGHT / 72), dpi=72, layout="constrained")
        axes = canvas.add_subplot()
        colors = [phase_color(name) for name in layers]
        areas = axes.stackplot(steps, *layers.values(), labels=list(layers), colors=colors, alpha=0.75)
        for index, area in enumerate(areas):
            area.set_gid(f"curve-{index}")
        axes.set(xlabel="step", ylabel=y)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        _legend(canvas, *axes.get_legend_handles_labels())
        return [Figure(name, title, _svg(canvas, name))]


def colored(names: Sequence[str]) -> dict[str, str]:
    """By name, the same colour in every picture that is drawn of these names."""
    return {name: PALETTE[place % len(PALETTE)] for place, name in enumerate(names)}


def phase_color(phase: str) -> str:
    """A phase has the same colour in every picture."""
    return PALETTE[PHASE_COLORS.get(phase, 5)]


def _draw_curve(axes: Any, curve: Curve, index: int) -> None:
    color = curve.color or PALETTE[index % len(PALETTE)]
    lone = len(curve.x) == 1 and curve.look in ("line", "dashed")  # which would not be seen
    look = _LOOKS["dots" if lone else curve.look]
    (line,) = axes.plot(curve.x, curve.y, color=color, label=curve.label or None, **look)
    line.set_gid(f"curve-{index}")
    if curve.low and curve.look in ("dots", "both"):
        below = [value - low for value, low in zip(curve.y, curve.low, strict=True)]
        above = [high - value for value, high in zip(curve.y, curve.high, strict=True)]
        axes.errorbar(curve.x, curve.y, (below, above), fmt="none", ecolor=color, elinewidth=1.2, capsize=3)
    elif curve.low:
        axes.fill_between(curve.x, curve.low, curve.high, color=color, alpha=0.15, linewidth=0)
    for place, (at, value, tag) in enumerate(zip(curve.x, curve.y, curve.tags, strict=False)):
        side, shift = (("left", 7), ("right", -7))[place % 2]  # neighbours may be close
        axes.annotate(tag, (at, value), xytext=(shift, 3), textcoords="offset points", color=INK, ha=side)


def _legend(canvas: Canvas, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Below the axes, in rows from left to right, as many to a row as there is room for."""
    most = max(1, _LEGEND_LETTERS // (max(map(len, labels)) + 5))
    rows = -(-len(labels) // most)
    columns = -(-len(labels) // rows)
    order = [place for first in range(columns) for place in range(first, len(labels), columns)]
    canvas.legend([handles[place] for place in order], [labels[place] for place in order],
                  loc="outside lower center", ncols=columns)  # fmt: skip


def _set_axes(
    axes: Any, curves: Sequence[Curve], sizes: Sequence[int], *, zoom: bool, from_zero: bool
) -> None:
    if sizes:
        axes.set_xscale("log", base=2)
        shown = sizes[:: -(-len(sizes) // _MOST_TICKS)]
        axes.xaxis.set_major_locator(FixedLocator(list(shown)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        whole = all(value == int(value) for curve in curves for value in curve.x)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole))
        if max(value for curve in curves for value in curve.x) >= 10_000:
            axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    if max(abs(value) for curve in curves for value in curve.y) >= 10_000:
        axes.yaxis.set_major_formatter(EngFormatter(sep=" "))
    axes.margins(x=0.15 if any(curve.tags for curve in curves) else 0.04, y=0.1)
    if from_zero:
        highest = max(value for curve in curves for value in (*curve.y, *curve.high))
        axes.set_ylim(0, 1.1 * highest if highest > 0 else 1)
    elif zoom:
        _zoom(axes, curves)


def _zoom(axes: Any, curves: Sequence[Curve]) -> None:
    end = max(value for curve in curves for value in curve.x)
    late = [b for curve in curves for a, b in zip(curve.x, curve.y, strict=True) if a >= end / 10]
    late += [curve.y[-1] for curve in curves]  # of one that ended before that, its end
    every = [value for curve in curves for value in curve.y]
    low, high = min(late), max(late)
    if max(every) - low > 2 * (high - low) > 0:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))


def _svg(canvas: Canvas, name: str) -> str:
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", metadata=_NO_METADATA)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    return own_names(svg.strip(), name)


def own_names(svg: str, name: str) -> str:
    """The SVG with ids that no other picture of the page has."""
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
