"""What follows from the trials of find-max: the largest size, the line, the sizes beyond it, what to use."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rich.table import Table

from grpo.environment import typed
from grpo.memory.budget import GB, readable
from grpo.workbench.find_max import INCREMENT, Checked, Trial
from grpo.workbench.line import (
    LEAST_FOR_A_LINE,
    Line,
    Risk,
    explaining_margin,
    fit_line,
    leaves_the_line,
    unseen_margin,
)
from grpo.workbench.pictures import picture

SAFE_SHARE = 0.8
CARDS = (1, 2, 4, 8)
_RISKS = {"fits": "no", "likely": "likely: a risk", "certain": "certain"}


@dataclass(frozen=True)
class Findings:
    """Peak bytes of the sizes that fitted, the sizes that did not, and the device they were tried on."""

    peaks: Mapping[int, float]
    failed: Sequence[int]
    total_bytes: float
    margin_bytes: float
    multiple: int
    at_most: int | None = None
    """Larger sizes were not to be tried."""
    flags: str = ""
    """Of train_lean.py, that the sizes hold with."""
    no_command: str | None = None
    """Why no command of train_lean.py does what was tried."""

    @property
    def maximum(self) -> int:
        """The largest size that fitted."""
        return max(self.peaks)

    @property
    def headroom_bytes(self) -> float:
        return self.total_bytes - self.peaks[self.maximum]

    @cached_property
    def line(self) -> Line | None:
        """Through all sizes that fitted, if it can be drawn and rises."""
        return fit_line(self.peaks)

    def risk(self, batch_size: int) -> Risk:
        """Whether the line puts a size beyond the device, or within its margin."""
        assert self.line is not None
        return self.line.risk(batch_size, self.total_bytes, self.margin_bytes)

    def next_sizes(self) -> list[int]:
        """After the maximum: the next two, those at risk (first and last), and the first ruled out."""
        line = self.line
        if line is None:
            return []
        step = self.multiple if self.maximum < 4 * INCREMENT else _rounded_up(INCREMENT, self.multiple)

        def steps_within(usable_bytes: float) -> int:
            """So many steps above the maximum the line stays within these bytes."""
            return max(0, (line.largest(usable_bytes) - self.maximum) // step)

        safe, possible = steps_within(self.total_bytes - self.margin_bytes), steps_within(self.total_bytes)
        wanted = [*range(1, min(safe, 2) + 1), possible + 1]
        if possible > safe:
            wanted += [safe + 1, possible]
        return [self.maximum + step * count for count in sorted(set(wanted))]


def findings(checked: Checked, trials: Sequence[Trial], flags: str) -> Findings:
    """What follows from trials. flags: of train_lean.py. ValueError where no size fitted."""
    broken = next((trial for trial in trials if trial.status not in ("ok", "out of memory")), None)
    if broken is not None:
        raise ValueError(
            f"batch {broken.batch_size} {broken.status}, and not for want of memory: {broken.message}"
        )
    peaks = {trial.batch_size: float(trial.line_bytes) for trial in trials if trial.fits}
    if not peaks:
        smallest = min(trials, key=lambda trial: trial.batch_size)
        raise ValueError(
            f"not even a batch of {smallest.batch_size} fits in {readable(checked.usable_bytes)} "
            f"({smallest.message}): give a smaller model, shorter texts, --gradient-checkpointing full, or "
            "more memory."
        )
    total = float(checked.usable_bytes)
    settings = checked.settings
    return Findings(
        peaks, [trial.batch_size for trial in trials if not trial.fits], total,
        unseen_margin(total, checked.device_type), settings.multiple, settings.train.max_batch_size,
        flags=flags, no_command=checked.no_command,
    )  # fmt: skip


def sentences(found: Findings) -> list[str]:
    """What was found, in words."""
    line, room = found.line, found.headroom_bytes
    largest = f"Largest batch that fitted: {found.maximum}"
    of_all = f"{room / found.total_bytes:.0%} of the {found.total_bytes / GB:.2f} that may be used"
    if found.at_most is not None and found.maximum + found.multiple > found.at_most:
        largest += " (no larger one was to be tried: --max-batch-size)"
    said = [f"{largest}; headroom {room / GB:.2f} GB, {of_all}."]
    if found.no_command is not None:
        said.append(f"No command of train_lean.py is recommended: {found.no_command}.")
    if line is None:
        said.append(
            "No line of memory over the batch size: it takes two sizes that fit, and peaks that rise."
        )
        return said
    concludes = len(found.peaks) >= LEAST_FOR_A_LINE
    fit = f", R² {line.r_squared:.4f}" if concludes else ""
    said.append(
        f"GB = {line.start_bytes / GB:.2f} + {line.bytes_per_sample / GB:.4g} × (batch - {line.first}){fit}."
    )
    bend = leaves_the_line(found.peaks)
    if not concludes:
        said.append(f"Whether it is a line cannot be told from {len(found.peaks)} sizes: it takes four.")
    elif bend is not None:
        said.append(f"It stops being a line at {bend}: the sizes below it foretell another peak.")
    else:
        said.append("Nowhere in what was measured does it stop being a line.")
    said += _about_margins(found, line)
    return said


def _about_margins(found: Findings, line: Line) -> list[str]:
    """How far the line can be trusted, and what would have told a failure."""
    margin, total = found.margin_bytes, found.total_bytes
    needed = explaining_margin(line, found.failed, total)
    if needed is None:
        return [
            f"A size whose line comes within {margin / GB:.2f} GB of that is a risk: a margin by one "
            "published case, for what an allocator does not show."
        ]
    first = min(found.failed)
    where = f"{first} ran out of memory where the line puts {line(first) / GB:.2f} GB"
    if needed <= 0:
        return [f"{where}, more than there is."]
    enough = "is enough" if margin >= needed else "was not"
    return [
        f"{where}, of {total / GB:.2f}: a margin of {needed / GB:.2f} GB ({needed / total:.1%}) would have "
        f"predicted that; the margin here, {margin / GB:.2f} GB, {enough}."
    ]


def next_table(found: Findings) -> Table:
    """The sizes beyond, and whether they run out of memory."""
    table = Table("batch", "GB on the line", "out of memory?", title="Next sizes", title_justify="left")
    for size in found.next_sizes():
        how = "yes, tried" if size in found.failed else _RISKS[found.risk(size)]
        table.add_row(str(size), f"{found.line(size) / GB:.2f}" if found.line else "", how)
    return table


# ---------------------------------------------------------------------------------- recommendations


def recommendations(found: Findings) -> dict[str, dict[str, Any]]:
    """Full, safe and accumulated sizes: rows at once, passes to accumulate, rows an optimizer step."""

    def size(rows: int, passes: int = 1) -> dict[str, Any]:
        rows = max(found.multiple, rows // found.multiple * found.multiple)
        return {"rows": rows, "accumulate": passes, "batch_size": rows * passes}

    full = found.maximum
    return {"full": size(full), "safe": size(int(SAFE_SHARE * full)), "accumulated": size(full // 2, 2)}


def recommendation_table(found: Findings) -> Table:
    table = Table("use", "rows at once", "accumulate", "batch", title="Recommended", title_justify="left")
    if found.no_command is None:
        table.add_column("command")
    for name, size in recommendations(found).items():
        flags = (f" --train-rows {size['rows']}" if size["accumulate"] > 1 else "") + found.flags
        command = []
        if found.no_command is None:
            command = [f"{typed('train')} --batch-size {size['batch_size']}{flags}"]
        table.add_row(name, *(str(size[key]) for key in ("rows", "accumulate", "batch_size")), *command)
    return table


def cards_table(found: Findings) -> Table:
    """The safe size on several cards of this kind."""
    safe = recommendations(found)["safe"]["rows"]
    table = Table("cards", "total batch", "launch", title="On several such cards", title_justify="left")
    for count in CARDS:
        grpo = f"train_lean.py --batch-size {count * safe}{found.flags}"
        script = grpo if found.no_command is None else "YOUR_SCRIPT"
        how = "python" if count == 1 else f"accelerate launch --num_processes {count}"
        table.add_row(str(count), str(count * safe), f"{how} {script}")
    return table


# ------------------------------------------------------------------------------------------ files


def as_json(found: Findings) -> dict[str, Any]:
    line = found.line
    return {
        "maximum": found.maximum,
        "total_bytes": found.total_bytes,
        "margin_bytes": found.margin_bytes,
        "headroom_bytes": found.headroom_bytes,
        "line": asdict(line) if line is not None else None,
        "leaves_the_line_at": leaves_the_line(found.peaks),
        "next": {str(size): found.risk(size) for size in found.next_sizes()},
        "recommended": recommendations(found),
        "sentences": sentences(found),
    }


def draw(found: Findings, file: Path) -> None:
    """Peaks over the batch size with their line, and the device."""
    with picture(file, (7, 4.2)) as axes:
        low, total = found.total_bytes - found.margin_bytes, found.total_bytes
        axes.axhspan(low / GB, total / GB, color="tab:orange", alpha=0.2, label="margin")
        axes.axhline(total / GB, color="tab:red", linewidth=1, label="device")
        if found.line is not None:
            ends = [min(found.peaks), max(found.next_sizes())]
            axes.plot(ends, [found.line(size) / GB for size in ends], color="tab:gray", label="line")
        axes.plot(list(found.peaks), [peak / GB for peak in found.peaks.values()], "o", label="measured")
        for size in found.failed:
            axes.axvline(size, color="tab:red", linestyle=":", linewidth=1)
            axes.annotate(
                f" {size}: out of memory", (size, 0), rotation=90, va="bottom", ha="right", fontsize=8
            )
        axes.set(xlabel="batch size", ylabel="GB (2**30 bytes)", ylim=(0, None))
        axes.set_title(f"Largest batch that fitted: {found.maximum}", loc="left")
        axes.legend(frameon=False, ncols=2)


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
