"""Which batch is worth it: how much a step of each size gets on with, and how long it takes.

Of a step of B rows the share B / (B + S) is signal, S the noise scale (McCandlish et al. 2018, eq. 2.8: what
a step gains of what one without noise would). Divided by its seconds that is progress, Pollux's goodput
(Qiao et al., OSDI 2021). Memory says which batch fits; this says which is the best to take. Left out: that
the scale grows as a model gets better, and that a larger batch bears a higher rate.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo.config import Config, SettingsError
from grpo.learning.advantages import group_advantages
from grpo.learning.noise import GradientSum
from grpo.run.pace import Pace
from grpo.run.setup import Run, open_run
from grpo.trainer import Trainer
from grpo.waiting import waiting
from grpo.workbench.pictures import picture

FEWEST, MOST = 4, 64
"""Batches a gradient is measured with."""
FAR = 4
"""Times the noise scale, or the largest batch that fits, up to which batches are looked at."""


@dataclass(frozen=True)
class Worth:
    """What was measured. Seconds; rows; the ends of a 95 % interval."""

    noise_rows: float | None
    noise_low: float
    noise_high: float | None
    pace: Pace
    whole_rows: int
    """The largest batch that no phase has to split."""
    batch_size: int
    """The one that was asked about."""
    group_size: int
    measured_rows: int

    def seconds(self, batch_size: int) -> float:
        return self.pace.seconds(batch_size, self.whole_rows)

    def signal(self, batch_size: int) -> float:
        """Of a step, the share that is not noise; 0 where the noise has no end."""
        return 0.0 if self.noise_rows is None else batch_size / (batch_size + self.noise_rows)

    def progress(self, batch_size: int) -> float:
        """A second, in steps without noise."""
        return self.signal(batch_size) / self.seconds(batch_size)

    @property
    def sizes(self) -> list[int]:
        """Doubling from a group, and the two that stand out."""
        most = FAR * max(self.whole_rows, self.batch_size, self.noise_rows or 0)
        doubling = [self.group_size]
        while 2 * doubling[-1] <= min(most, 64 * max(self.whole_rows, self.batch_size)):
            doubling.append(2 * doubling[-1])
        return sorted({*doubling, self.batch_size, self.whole_rows})

    @property
    def best(self) -> int:
        return max(self.sizes, key=self.progress)


class _Probe:
    """Stands where a trainer has its stepper, and takes no step."""

    num_skipped = skipped_in_a_row = 0
    moved = False

    def __init__(self, run: Run, num_rows: int) -> None:
        self.parameters = [p for p in run.policy.model.parameters() if p.requires_grad]
        self.sum = GradientSum(self.parameters, num_rows)
        self._optimizer = run.optimizer

    def step(self, accumulate: Callable[[], dict[str, float]]) -> dict[str, float]:
        self._optimizer.zero_grad(set_to_none=True)
        metrics = accumulate()
        self.sum.add()
        self._optimizer.zero_grad(set_to_none=True)
        return {**metrics, "skipped": 0.0}


def measure(config: Config, console: Console, *, batches: int, rows: int) -> Worth:
    """Gradients of `batches` times `rows` completions at the weights as they are, and how long they take.

    SettingsError for what cannot be measured.
    """
    _check(config, batches, rows)
    asked = config.batch_size if config.batch_size != "auto" else rows
    with TemporaryDirectory() as folder:
        config = replace(config, batch_size=rows, num_iterations=1, runs_dir=Path(folder), name=None,
                         trackers=(), eval_interval=0)  # fmt: skip
        with open_run(config) as run:
            trainer = Trainer(run, console)
            probe, small = _Probe(run, rows), _Probe(run, config.group_size)
            seconds: list[float] = []
            small_seconds: list[float] = []
            for size in (rows, config.group_size):  # the first time is spent on other things
                _gradient(trainer, _Probe(run, size), 2 * batches, size)
            with waiting("gradients") as done:
                for number in range(batches):
                    seconds.append(_gradient(trainer, probe, number, rows))
                    if number % 4 == 0:
                        small_seconds.append(_gradient(trainer, small, batches + number, config.group_size))
                    done((number + 1) / batches)
            row_s = max(0.0, median(seconds) - median(small_seconds)) / max(1, rows - config.group_size)
            pace = Pace(max(0.0, median(small_seconds) - config.group_size * row_s), row_s)
            noise, low, high = probe.sum.rows()
            return Worth(
                noise, low, high, pace, _largest_whole(run), asked, config.group_size, batches * rows
            )


def _check(config: Config, batches: int, rows: int) -> None:
    if not FEWEST <= batches <= MOST:
        raise SettingsError(f"batches is {batches}: give {FEWEST} to {MOST}.")
    if rows % config.group_size or rows < 2 * config.group_size:
        raise SettingsError(
            f"rows is {rows}, but groups are of {config.group_size}: give a multiple of that, two at least."
        )
    if config.shard:
        raise SettingsError("shard is on: a noise scale is measured on one device; leave it out.")
    if config.resume is not None:
        raise SettingsError("resume is given: name the run's checkpoint as --model instead.")


def _gradient(trainer: Trainer, probe: _Probe, number: int, rows: int) -> float:
    """Take a batch up to its update, which is not made; its seconds."""
    run, config, start = trainer.run, trainer.config, perf_counter()
    trainer.stepper = probe  # type: ignore[assignment]
    prompts = run.source.draw(rows // config.group_size)
    trainer.phases.plan(prompts)
    sampled, scores = trainer.sample_and_reward(number, prompts)
    rewards, old_logp, ref_logp = trainer.score(sampled, scores)
    advantages = group_advantages(rewards, config.group_size, scale=config.advantage_scale)
    trainer.learn(number, sampled, advantages, old_logp, ref_logp)
    return perf_counter() - start


def _largest_whole(run: Run) -> int:
    most, shape = run.config.max_batch_size, (run.longest_prompt, run.config.sampling.max_new_tokens)
    for phase in run.memory.phases:
        most = run.memory.largest_whole(phase, run.budget, most, *shape)
    return max(run.config.group_size, most)


# ----------------------------------------------------------------------------------------- for people


def worth_table(worth: Worth) -> Table:
    columns = ("batch", "s a step", "samples/s", "signal in a step", "progress a minute", "")
    title = f"At these weights; up to {worth.whole_rows} rows need no splitting"
    table = Table(*columns, title=title, title_justify="left")
    for column in table.columns[:-1]:
        column.justify = "right"
    best = worth.progress(worth.best) or 1.0
    marks = {"yours": worth.batch_size, "the largest at once": worth.whole_rows}
    if worth.noise_rows is not None:
        marks = {"best": worth.best, **marks}
    for size in worth.sizes:
        table.add_row(
            str(size), f"{worth.seconds(size):.3g}", f"{size / worth.seconds(size):.3g}",
            f"{worth.signal(size):.0%}", f"{worth.progress(size) / best:.0%}",
            ", ".join(mark for mark, of in marks.items() if of == size),
        )  # fmt: skip
    return table


def in_words(worth: Worth) -> list[str]:
    """The noise scale, the batch that is best, and what accumulation costs."""
    if worth.noise_rows is None:
        return [
            f"{worth.measured_rows:,} rows do not show in which direction to go: the noise scale is beyond "
            f"what they can measure, at least {worth.noise_low:,.0f} rows. Give more --batches, or rewards "
            "that differ."
        ]
    high = "no end" if worth.noise_high is None else f"{worth.noise_high:,.0f}"
    said = [
        f"The noise scale is about {worth.noise_rows:,.0f} rows (95 %: {worth.noise_low:,.0f} to {high})."
    ]
    best, yours = worth.best, worth.batch_size
    share = worth.progress(yours) / worth.progress(best)
    said.append(
        f"Batch {best} gets on fastest; {yours} makes {share:.0%} of its progress a minute."
        if best != yours else f"Batch {best} is the one that gets on fastest."
    )  # fmt: skip
    pass_s, double = worth.pace.pass_s, 2 * worth.whole_rows
    said.append(
        f"Beyond {worth.whole_rows} rows a step accumulates: each pass costs {pass_s:.2g} s besides its "
        f"rows, {pass_s / worth.seconds(double):.1%} of a step of {double}."
    )
    return said


def save(worth: Worth, folder: Path) -> list[Path]:
    """worth_it.json and worth_it.png; which files these are."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"batch_size": size, "seconds": worth.seconds(size), "signal": worth.signal(size),
             "progress": worth.progress(size)} for size in worth.sizes]  # fmt: skip
    numbers, drawing = folder / "worth_it.json", folder / "worth_it.png"
    numbers.write_text(json.dumps({**asdict(worth), "best": worth.best, "rows": rows}, indent=1) + "\n")
    with picture(drawing, (7.0, 4.0)) as axes:
        _draw(axes, worth, worth.sizes)
    return [numbers, drawing]


def _draw(axes: Any, worth: Worth, sizes: Sequence[int]) -> None:
    best, fastest = worth.progress(worth.best) or 1.0, max(size / worth.seconds(size) for size in sizes)
    lines = (
        ("progress a minute", [worth.progress(size) / best for size in sizes], "o-"),
        ("samples a second", [size / worth.seconds(size) / fastest for size in sizes], "s--"),
        ("signal in a step", [worth.signal(size) for size in sizes], "^:"),
    )
    for label, values, look in lines:
        axes.plot(sizes, [100 * value for value in values], look, label=label)
    axes.axvline(worth.whole_rows, color="grey", linewidth=1)
    axes.text(worth.whole_rows, 2, " largest at once", color="grey")
    axes.set(xscale="log", xlabel="batch size", ylabel="percent (of the most)", ylim=(0, 105))
    axes.set_xticks(sizes, [str(size) for size in sizes], rotation=45)
    axes.minorticks_off()
    axes.legend(loc="upper left")
