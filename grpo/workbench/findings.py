"""What follows from the trials of find-max: the largest size, the line, the sizes beyond it, what to use."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from grpo.config import Config, to_flat
from grpo.environment import typed
from grpo.memory.budget import GB, readable
from grpo.workbench.find_max import INCREMENT, Checked, Trial
from grpo.workbench.line import LEAST_FOR_A_LINE, Line, Risk, fit_line, leaves_the_line, unseen_margin
from grpo.workbench.pictures import picture
from grpo.workbench.settings import FindMax
from grpo.workbench.tables import Row

SAFE_SHARE = 0.8
CARDS = (2, 4, 8)
"""Numbers of cards that the safe size is multiplied for."""


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

    def next_sizes(self) -> dict[int, Risk]:
        """After the maximum: the next two, those at risk (first and last), and the first ruled out."""
        line = self.line
        if line is None:
            return {}
        step = self.multiple
        if self.maximum >= 4 * INCREMENT:
            step *= -(-INCREMENT // step)  # the next multiple of it

        def steps_within(usable_bytes: float) -> int:
            """So many steps above the maximum the line stays within these bytes."""
            return max(0, (line.largest(usable_bytes) - self.maximum) // step)

        safe, possible = steps_within(self.total_bytes - self.margin_bytes), steps_within(self.total_bytes)
        wanted = {*range(1, min(safe, 2) + 1), possible + 1}
        if possible > safe:
            wanted |= {safe + 1, possible}
        sizes = (self.maximum + step * count for count in sorted(wanted))
        return {size: line.risk(size, self.total_bytes, self.margin_bytes) for size in sizes}


def findings(checked: Checked, trials: Sequence[Trial], flags: str = "") -> Findings:
    """What follows from trials. flags: of train_lean.py. ValueError where no size fitted."""
    settings, usable = checked.settings, checked.usable_bytes
    for trial in trials:
        if trial.status not in ("ok", "out of memory"):
            raise ValueError(
                f"batch {trial.batch_size} {trial.status}, and not for want of memory: {trial.message}"
            )
    peaks = {trial.batch_size: float(trial.line_bytes) for trial in trials if trial.fits}
    if not peaks:
        smallest = min(trials, key=lambda trial: trial.batch_size)
        raise ValueError(
            f"not even a batch of {smallest.batch_size} fits in {readable(usable)} "
            f"({smallest.message}): give a smaller model, shorter texts, --gradient-checkpointing full, or "
            "more memory."
        )
    return Findings(
        peaks, [trial.batch_size for trial in trials if not trial.fits], usable,
        unseen_margin(usable, checked.device_type), settings.multiple, settings.train.max_batch_size,
        flags=flags, no_command=checked.no_command,
    )  # fmt: skip


def flags_of(train: Config) -> str:
    """What train_lean.py has to be given besides the batch size, to do what was tried."""
    defaults, words = to_flat(Config()), []
    for name, value in to_flat(train).items():
        if value == defaults[name] or name in FindMax.CHOSEN:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)


# ---------------------------------------------------------------------------------------- for people


def facts(found: Findings) -> list[Row]:
    """What was found: a figure, and how far it can be trusted."""
    rows: list[Row] = []

    def fact(what: str, value: object, note: str = "") -> None:
        rows.append({"what": what, "value": value, "note": note})

    total, margin, line = found.total_bytes, found.margin_bytes, found.line
    capped = found.at_most is not None and found.maximum + found.multiple > found.at_most
    fact("largest batch that fitted", found.maximum,
         "no larger one was to be tried: --max-batch-size" if capped else "")  # fmt: skip
    fact("peak", _gb(found.peaks[found.maximum]), f"of {_gb(total)} that may be used")
    fact("headroom", _gb(found.headroom_bytes), f"{found.headroom_bytes / total:.0%} of that")
    if found.no_command is not None:
        fact("command", "none", f"of train_lean.py: {found.no_command}")
    if line is None:
        fact(
            "line", "none", "of memory over the batch size: it takes two sizes that fit, and peaks that rise"
        )
        return rows
    slope = f"{line.bytes_per_sample / GB:.4g} × (batch - {line.first})"
    fact("line, GB", f"{line.start_bytes / GB:.2f} + {slope}", f"through {len(found.peaks)} sizes")
    if len(found.peaks) < LEAST_FOR_A_LINE:
        fact("R²", "not known", f"whether it is a line takes {LEAST_FOR_A_LINE} sizes to tell")
    else:
        bend = leaves_the_line(found.peaks)
        note = (
            f"no line from {bend} on: the sizes below it foretell another peak"
            if bend
            else "a line throughout"
        )
        fact("R²", f"{line.r_squared:.4f}", note)
    fact(
        "margin",
        _gb(margin),
        "for what an allocator does not show, by one published case: within it is a risk",
    )
    if found.failed:
        first = min(found.failed)
        needed = total - line(first)
        verdict = "the line ruled it out"
        if needed > 0:
            enough = "is enough" if margin >= needed else "was not"
            verdict = (
                f"a margin of {_gb(needed)} ({needed / total:.1%}) would have told it, and this one {enough}"
            )
        fact(f"{first} on the line", _gb(line(first)), f"it ran out of memory: {verdict}")
    return rows


def _gb(size: float) -> str:
    return f"{size / GB:.2f} GB"


def next_rows(found: Findings) -> list[Row]:
    """The sizes beyond, and whether they run out of memory."""
    words = {"fits": "no", "likely": "likely: a risk", "certain": "certain"}
    return [
        {
            "batch": size, "GB on the line": f"{found.line(size) / GB:.2f}" if found.line else None,
            "out of memory?": "yes, tried" if size in found.failed else words[risk],
        }
        for size, risk in found.next_sizes().items()
    ]  # fmt: skip


def recommended(found: Findings) -> list[Row]:
    """Full, safe and accumulated sizes, and the safe one on several cards; each with its command, if any."""
    full = found.maximum
    wanted = [("full", full, 1, 1), ("safe", int(SAFE_SHARE * full), 1, 1), ("accumulated", full // 2, 2, 1)]
    wanted += [("safe", int(SAFE_SHARE * full), 1, count) for count in CARDS]
    rows: list[Row] = []
    for use, size, passes, cards in wanted:
        at_once = max(found.multiple, size // found.multiple * found.multiple)
        batch = at_once * passes * cards
        launch = typed("train")
        if cards > 1:
            launch = f"accelerate launch --num_processes {cards} train_lean.py"
        split = f" --train-rows {at_once}" if passes > 1 else ""
        command = f"{launch} --batch-size {batch}{split} {found.flags}".rstrip()
        row = {"use": use, "cards": cards, "rows at once": at_once, "accumulate": passes, "batch": batch}
        rows.append(row | ({"command": command} if found.no_command is None else {}))
    return rows


def as_json(found: Findings) -> dict[str, Any]:
    return {
        "maximum": found.maximum,
        "total_bytes": found.total_bytes,
        "margin_bytes": found.margin_bytes,
        "headroom_bytes": found.headroom_bytes,
        "line": asdict(found.line) if found.line is not None else None,
        "leaves_the_line_at": leaves_the_line(found.peaks),
        "next": found.next_sizes(),
        "recommended": recommended(found),
        "facts": facts(found),
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
