"""How a step's seconds grow with the batch and with the tokens of a completion: a line, or a cliff?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from loguru import logger
from rich import box
from rich.table import Table

from benchmarks.speed import WARM_UP_STEPS, working
from benchmarks.speed_limits import median_split
from benchmarks.speed_work import prepare
from benchmarks.speed_worker import StepTime, Work
from grpo.workbench.pictures import picture

Axis = Literal["batch size", "new tokens"]
GROWTH: Mapping[Axis, Sequence[int]] = {
    "batch size": (8, 16, 32, 64, 128, 256),
    "new tokens": (32, 64, 96, 128, 192, 256),
}
CLIFF = 1.35
"""A size is a cliff if it takes this many times what those before it lead one to expect."""
PROMPT_TOKENS, OTHER_SIZE, ROUNDS = 60, 64, 5
_PHASES = ("sample", "score", "learn")


@dataclass(frozen=True)
class Line:
    """Median seconds of a step, and of its phases, at each size along one axis."""

    axis: Axis
    sizes: Sequence[int]
    seconds: Sequence[float]
    phases: Mapping[str, Sequence[float]]

    @property
    def fit(self) -> tuple[float, float]:
        """Seconds at size 0 and for each one more, by relative least squares."""
        sizes, seconds = np.array(self.sizes, dtype=float), np.array(self.seconds)
        design = np.stack([1 / seconds, sizes / seconds], axis=1)
        start, slope = np.linalg.lstsq(design, np.ones(len(sizes)), rcond=None)[0]
        return float(start), float(slope)

    @property
    def worst(self) -> float:
        """The largest distance from the line, relative to it."""
        start, slope = self.fit
        expected = start + slope * np.array(self.sizes)
        return float(np.abs(np.array(self.seconds) / expected - 1).max())

    @property
    def cliffs(self) -> list[int]:
        """Sizes that take `CLIFF` times the last size's seconds, scaled up in proportion."""
        pairs = zip(self.sizes, self.seconds, strict=True)
        (size, seconds), *rest = pairs
        found = []
        for larger, took in rest:
            if took > CLIFF * seconds * larger / size:
                found.append(larger)
            size, seconds = larger, took
        return found


def measure_growth(axis: Axis, sizes: Sequence[int], rounds: int = ROUNDS) -> Line:
    """Our steps of rook-tiny's shape, none ending early; the sizes take turns, each in its own process."""
    with TemporaryDirectory() as folder:
        model, prompts, _ = prepare("rook-tiny without end", PROMPT_TOKENS, Path(folder))
        work = Work("ours", str(model), str(prompts), folder, steps=WARM_UP_STEPS + rounds + 1)
        works = {}
        for size in sizes:
            own = Path(folder, str(size))
            own.mkdir()
            batch, tokens = (size, OTHER_SIZE) if axis == "batch size" else (OTHER_SIZE, size)
            works[size] = replace(work, folder=str(own), batch_size=batch, max_new_tokens=tokens)
        steps: dict[int, list[StepTime]] = {size: [] for size in sizes}
        with working(works) as workers:
            for turn in range(WARM_UP_STEPS + rounds):
                for size in sizes if turn % 2 else reversed(sizes):
                    step = workers[size].step()
                    if turn >= WARM_UP_STEPS:
                        steps[size].append(step)
                        logger.info("{} {}: {:.2f} s", axis, size, step.seconds)
    return line_of(axis, sizes, list(steps.values()))


def line_of(axis: Axis, sizes: Sequence[int], steps: Sequence[Sequence[StepTime]]) -> Line:
    """steps: those measured at each size."""

    seconds = [float(np.median([step.seconds for step in each])) for each in steps]
    splits = [median_split(each) for each in steps]
    return Line(axis, sizes, seconds, {phase: [split[phase] for split in splits] for phase in _PHASES})


def growth_table(line: Line) -> Table:
    table = Table(line.axis, "seconds", "on the line", *_PHASES, box=box.MARKDOWN)
    start, slope = line.fit
    for place, (size, seconds) in enumerate(zip(line.sizes, line.seconds, strict=True)):
        split = (f"{line.phases[phase][place]:.2f}" for phase in _PHASES)
        table.add_row(str(size), f"{seconds:.2f}", f"{start + slope * size:.2f}", *split)
    return table


def draw_growth(lines: Sequence[Line], file: Path) -> None:
    """Seconds of a step over each axis, with the fitted line."""
    with picture(file, (10, 4), ncols=len(lines)) as panels:
        for axes, line in zip(panels, lines, strict=True):
            start, slope = line.fit
            ends = np.array([0, max(line.sizes)])
            axes.plot(ends, start + slope * ends, color="0.7", label="fitted line")
            axes.plot(line.sizes, line.seconds, "o-", color="black", label="step")
            for place, phase in enumerate(_PHASES):
                axes.plot(line.sizes, line.phases[phase], "o-", markersize=3, color=f"C{place}", label=phase)
            axes.set(xlabel=line.axis, ylabel="seconds", xlim=(0, None), ylim=(0, None))
        panels[0].legend(frameon=False)
