"""Curves as small SVG pictures, legible at the width of a phone.

Each is drawn 400 wide with letters 13 high, for a page that shows it between 340 and 440 pixels wide. Text
stays text. Left out: anything that would need a script, such as values under the pointer.
"""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FixedLocator, MaxNLocator, NullLocator

from grpo.workbench.report.read import points
from grpo.workbench.report.text import anchor
from grpo.workbench.sizes import Record, figure

BATCH_SIZE = "batch size"
PALETTE = ("#165472", "#d89000", "#3091f2", "#723900", "#4aa587", "#b070c0", "#0000f2", "#00178c")
"""Colours that are told apart without red or green sight as well, and dark enough for lines on white."""
LEAST_SHARE = 0.005
"""A part of a stack that is a smaller share of the whole is left out."""
_INK, _SOFT = "#1c2430", "#5a6675"
_PHASES = ("sample", "score", "learn", "update", "reward", "other", "wait", "reduce")
COLORS = dict(zip(_PHASES, PALETTE, strict=True)) | {"all": _INK, "usable": _INK, "ran out": PALETTE[3]}
"""Colours of curves with these labels, the same in every picture; LOOKS are their line styles."""
LOOKS = {"predicted": "--", "held-out, best": "--", "usable": ":", "ran out": "x"}
_STYLE = {
    "figure.figsize": (400 / 72, 280 / 72),
    "figure.dpi": 72,
    "figure.constrained_layout.use": True,
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.size": 13,
    "font.family": "sans-serif",
    "text.color": _INK,
    "axes.labelcolor": _SOFT,
    "axes.edgecolor": "#aab3bd",
    "axes.linewidth": 0.8,
    "xtick.color": _SOFT,
    "ytick.color": _SOFT,
    "axes.grid": True,
    "grid.color": "#e3e7ec",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5.5,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "axes.formatter.useoffset": False,
}


def line(
    title: str,
    records: Sequence[Record],
    x: str,
    curves: Mapping[str, str],
    *,
    y: str,
    xlabel: str = "",
    caption: str = "",
    look: str = "-",
    unit: float = 1.0,
    in_order: bool = False,
    zoom: bool = False,
    from_zero: bool = False,
    unless_zero: bool = False,
) -> Markup:
    """A titled picture of records' figures over their figure `x`; "" where there is no point to draw.

    x: BATCH_SIZE has a logarithmic axis that names the sizes. curves: the names of figures by label. The
    legend leaves out "" and what begins with _, which is dashed. One whose points all have NAME/low and
    NAME/high has them as bars. look: matplotlib's. unit: what one of the y axis is. in_order: colours go from
    dark to light. zoom: leave out what lies above where curves are after a tenth of their length, as a loss's
    first fall hides the rest. unless_zero: no picture where all figures are 0.
    """
    colors = _colors_of(curves)
    shades = mpl.colormaps["viridis"](np.linspace(0, 0.85, len(curves)))
    with mpl.rc_context(_STYLE):
        axes, drawn = Figure().subplots(), []
        for index, (label, name) in enumerate(curves.items()):
            color = colors[label]
            values = np.array(points(records, x, name)).reshape(-1, 2) / (1, unit)
            if not len(values):
                continue
            drawn.append(values)
            how = "--" if label.startswith("_") else LOOKS.get(label, look)
            how = "o" if len(values) == 1 and how in ("-", "--") else how  # a line of one point is not seen
            size, color = 9 if how == "x" else 5.5, shades[index] if in_order else color
            words = label[:1] + label[1:].replace("_", " ")
            (graph,) = axes.plot(*values.T, how, color=color, label=words, markersize=size)
            graph.set(gid=f"curve-{index}", markeredgewidth=size / 4)
            ends = np.array(points(records, x, name, f"{name}/low", f"{name}/high"))
            if len(ends) == len(values):
                low, high = ends[:, 2:].T / unit
                axes.vlines(ends[:, 0], low, high, colors=color, linewidth=1.2)
        if not drawn or (unless_zero and not any(curve[:, 1].any() for curve in drawn)):
            return Markup("")
        axes.set(xlabel=xlabel or x, ylabel=y)
        axes.margins(x=0.04, y=0.1)
        _scale(axes, drawn, by_size=x == BATCH_SIZE, zoom=zoom, from_zero=from_zero)
        return _figure(axes, title, caption)


def stack(
    title: str, records: Sequence[Record], x: str, parts: Mapping[str, str], *, y: str, caption: str = ""
) -> Markup:
    """A titled picture of figures on top of each other over `x`, the largest below; "" without any.

    parts: the names of figures by label. A record that lacks one has 0 there. Those that come to less than
    a two-hundredth of all are left out.
    """
    places = [place for (place,) in points(records, x)]
    heights = {
        label: np.array([figure(record, name) or 0.0 for record in records if figure(record, x) is not None])
        for label, name in parts.items()
    }
    totals = {label: float(values.sum()) for label, values in heights.items()}
    least = LEAST_SHARE * sum(totals.values())
    labels = sorted((label for label in totals if totals[label] > least), key=lambda label: -totals[label])
    if not labels:
        return Markup("")
    colors = _colors_of(labels)
    with mpl.rc_context(_STYLE):
        axes = Figure().subplots()
        layers = axes.stackplot(
            places,
            *(heights[label] for label in labels),
            labels=[label.capitalize() for label in labels],
            colors=[colors[label] for label in labels],
            step="mid" if len(places) > 1 else None,
        )
        for number, layer in enumerate(layers):
            layer.set_gid(f"layer-{number}")
        axes.set(xlabel=x, ylabel=y)
        axes.margins(x=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        return _figure(axes, title, caption)


def histogram(
    title: str, samples: Mapping[str, Sequence[float]], *, x: str, y: str, caption: str = ""
) -> Markup:
    """A titled picture of how often figures fall into each of 20 ranges, as outlines; "" without any.

    samples: figures by label.
    """
    filled = {label: np.asarray(values) for label, values in samples.items() if len(values)}
    if not filled:
        return Markup("")
    edges = np.histogram_bin_edges(np.concatenate([*filled.values()]), bins=20)
    colors = _colors_of(filled)
    with mpl.rc_context(_STYLE):
        axes: Any = Figure().subplots()
        for number, (label, values) in enumerate(filled.items()):
            weights = np.full(len(values), 1 / len(values))
            _, _, outlines = axes.hist(
                values, edges, weights=weights, histtype="step", label=label.capitalize(), linewidth=1.8
            )
            for outline in outlines:
                outline.set(edgecolor=colors[label], gid=f"curve-{number}")
        axes.set(xlabel=x, ylabel=y)
        return _figure(axes, title, caption)


def _figure(axes: Any, title: str, caption: str) -> Markup:
    html = '<figure class="picture"><figcaption><strong>{}</strong> {}</figcaption>\n{}\n</figure>'
    return Markup(html).format(title, caption, own_ids(_svg(axes), title))


def _colors_of(labels: Iterable[str]) -> dict[str, str]:
    """A colour for each label: its own, or one that no other label of the picture has, as far as they go.

    A label that begins with _ has the colour of the one without.
    """
    labels = list(labels)
    own = {label: COLORS.get(label) for label in dict.fromkeys(it.removeprefix("_") for it in labels)}
    free = [color for color in PALETTE if color not in own.values()] or PALETTE
    others = iter(cycle(free))
    colors = {label: color or next(others) for label, color in own.items()}
    return {label: colors[label.removeprefix("_")] for label in labels}


def own_ids(svg: str, name: str) -> Markup:
    """The SVG with ids that no other picture of the page has."""
    return Markup(re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{anchor(name)}-", svg))


def _scale(axes: Any, drawn: Sequence[Any], *, by_size: bool, zoom: bool, from_zero: bool) -> None:
    places, values = np.concatenate(drawn).T
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=bool(np.all(places % 1 == 0))))
    for axis, largest in ((axes.xaxis, places.max()), (axes.yaxis, np.abs(values).max())):
        if largest >= 10_000:
            axis.set_major_formatter(EngFormatter(sep=" "))
    if by_size:
        sizes = np.unique(places).tolist()
        axes.set_xscale("log", base=2)
        ticks = FixedLocator(sizes[:: -(-len(sizes) // 7)])
        axes.xaxis.set(major_locator=ticks, major_formatter="{x:.0f}", minor_locator=NullLocator())
    # of a curve that ended before the first tenth, its end
    late = np.concatenate([curve[curve[:, 0] >= min(places.max() / 10, curve[-1, 0]), 1] for curve in drawn])
    low, high = late.min(), late.max()
    if zoom and values.max() - low > 2 * (high - low) > 0:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))
    if from_zero and values.min() >= 0:
        axes.set_ylim(bottom=0, top=max(axes.get_ylim()[1], 1e-9))


def _svg(axes: Any) -> str:
    """With a legend below the axes, in as many columns as there is room for."""
    labels = axes.get_legend_handles_labels()[1]
    if labels:
        columns = max(1, 50 // (max(map(len, labels)) + 5))  # letters of a row, 5 of them for the mark
        axes.figure.legend(loc="outside lower center", ncols=min(columns, len(labels)))
    buffer = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    axes.figure.savefig(buffer, format="svg", metadata=nothing)
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>", "", buffer.getvalue(), flags=re.DOTALL)
    return svg[svg.index("<svg") :].strip()
