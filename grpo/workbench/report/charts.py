"""Curves as small SVG pictures, legible at the width of a phone.

Each is drawn 400 wide with letters 13 high, for a page that shows it between 340 and 440 pixels wide. Text
stays text. Left out: anything that would need a script, such as values under the pointer.
"""

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from grpo.workbench.report.page import Picture

Points = tuple[Sequence[float], Sequence[float]]
"""x and y of equal length, or the low and the high ends of intervals."""
PALETTE = ("#1f5fa8", "#c2571a", "#2f7d4f", "#8a4a9e", "#9a7516", "#4b5b6b", "#b23a57", "#2a8c8c")
"""Told apart with any kind of sight, and dark enough for thin lines on white."""
FAILED = PALETTE[6]
PHASES = ("sample", "score", "learn", "update", "reward", "other", "wait", "reduce")
PHASE_COLORS = dict(zip(PHASES, PALETTE, strict=True))
_INK, _SOFT = "#1c2430", "#5a6675"
_STYLE = {
    "figure.figsize": (400 / 72, 280 / 72), "figure.dpi": 72, "figure.constrained_layout.use": True,
    "svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 13, "font.family": "sans-serif",
    "text.color": _INK, "axes.labelcolor": _SOFT, "axes.edgecolor": "#aab3bd", "axes.linewidth": 0.8,
    "xtick.color": _SOFT, "ytick.color": _SOFT, "axes.grid": True, "grid.color": "#e3e7ec",
    "grid.linewidth": 0.8, "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False,
    "lines.linewidth": 1.8, "lines.markersize": 5.5, "legend.frameon": False, "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2, "axes.formatter.useoffset": False,
}  # fmt: skip


def line(
    title: str,
    curves: Mapping[str, Points],
    *,
    x: str,
    y: str,
    looks: Mapping[str, str] | None = None,
    colors: Mapping[str, str] | None = None,
    bands: Mapping[str, Points] | None = None,
    tags: Sequence[object] = (),
    log: Sequence[int] = (),
    level: tuple[float, str] | None = None,
    zoom: bool = False,
    from_zero: bool = False,
    caption: str = "",
) -> Picture | None:
    """None where there is no point to draw.

    curves: by label; one that is "" or begins with _ stands in no legend. looks (matplotlib's), colors, bands
    (95 % intervals): by label, too. tags: a word beside each point. log: batch sizes, for a logarithmic axis
    that names them. level: a horizontal line. zoom: leave out what lies above where curves are after a
    tenth of their length, as a loss's first fall hides the rest.
    """
    shown = {label: curve for label, curve in curves.items() if len(curve[0])}
    if not shown:
        return None
    with mpl.rc_context(_STYLE):
        axes = Figure().subplots()
        for index, label in enumerate(curves):
            if label in shown:
                color = (colors or {}).get(label, PALETTE[index % len(PALETTE)])
                look, band = (looks or {}).get(label, "-"), (bands or {}).get(label)
                _curve(axes, f"curve-{index}", label, shown[label], color, look, band)
        for place, (at, value, tag) in enumerate(zip(*next(iter(shown.values())), tags, strict=False)):
            side, shift = (("left", 7), ("right", -7))[place % 2]  # neighbours may be close
            axes.annotate(str(tag), (at, value), (shift, 3), textcoords="offset points", ha=side)
        if level is not None:
            axes.axhline(level[0], color=_INK, linewidth=1, linestyle=(0, (2, 2)), label=level[1])
        axes.set(xlabel=x, ylabel=y)
        _ticks(axes, list(shown.values()), log)
        axes.margins(x=0.15 if tags else 0.04, y=0.1)
        if zoom:
            _zoom(axes, list(shown.values()))
        if from_zero and min(value for _, ys in shown.values() for value in ys) >= 0:
            axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1e-9))
        return _picture(axes, title, caption)


def stack(
    title: str, steps: Sequence[float], phases: Mapping[str, Sequence[float]], y: str
) -> Picture | None:
    """Phases on top of each other over steps, each (steps,); None where there are none."""
    if not steps or not phases:
        return None
    with mpl.rc_context(_STYLE):
        axes = Figure().subplots()
        colors = [PHASE_COLORS.get(phase, _SOFT) for phase in phases]
        areas = axes.stackplot(steps, *phases.values(), labels=list(phases), colors=colors, alpha=0.75)
        for index, area in enumerate(areas):
            area.set_gid(f"curve-{index}")
        axes.set(xlabel="step", ylabel=y)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        return _picture(axes, title, "")


def ramp(names: Sequence[str]) -> dict[str, str]:
    """Colours from dark to light, for what has an order."""
    shades = mpl.colormaps["viridis"]([0.85 * place / max(1, len(names) - 1) for place in range(len(names))])
    return {name: mpl.colors.to_hex(shade) for name, shade in zip(names, shades, strict=True)}


def own_ids(svg: str, name: str) -> str:
    """The SVG with ids that no other picture of the page has."""
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{anchor(name)}-", svg)


def anchor(title: str) -> str:
    """A title as an id."""
    return "".join(letter if letter.isalnum() else "-" for letter in title.lower())


def _curve(
    axes: Any, gid: str, label: str, curve: Points, color: str, look: str, band: Points | None
) -> None:
    xs, ys = curve
    (drawn,) = axes.plot(xs, ys, look, color=color, label=label)
    drawn.set_gid(gid)
    if look == "x":
        drawn.set(markersize=9, markeredgewidth=2.5)
    if len(xs) == 1 and look in ("-", "--"):
        drawn.set_marker("o")  # as a line of one point would not be seen
    if band is not None:
        reach = [[abs(end - value) for end, value in zip(ends, ys, strict=True)] for ends in band]
        axes.errorbar(xs, ys, reach, fmt="none", ecolor=color, elinewidth=1.2, capsize=3)


def _ticks(axes: Any, curves: Sequence[Points], log: Sequence[int]) -> None:
    """Few; batch sizes by their names, large numbers by thousands and millions."""
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set(major_locator=FixedLocator(list(log[:: -(-len(log) // 7)])),
                       major_formatter="{x:.0f}", minor_locator=NullLocator())  # fmt: skip
    else:
        whole = all(float(value).is_integer() for xs, _ in curves for value in xs)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=whole))
    for axis, place in ((axes.xaxis, 0), (axes.yaxis, 1)):
        if max(abs(value) for curve in curves for value in curve[place]) >= 10_000 and (place or not log):
            axis.set_major_formatter(EngFormatter(sep=" "))


def _zoom(axes: Any, curves: Sequence[Points]) -> None:
    end = max(xs[-1] for xs, _ in curves)
    late = [b for xs, ys in curves for a, b in zip(xs, ys, strict=True) if a >= end / 10]
    late += [ys[-1] for _, ys in curves]  # of one that ended before that, its end
    low, high = min(late), max(late)
    if max(value for _, ys in curves for value in ys) - low > 2 * (high - low) > 0:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))


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
