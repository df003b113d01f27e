"""Conclusions from the trials of find-max: the largest size, the line, the sizes beyond it, what to use."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from grpo.config import Config, to_plain
from grpo.environment import command_hint
from grpo.errors import UserError
from grpo.logs.tables import Row
from grpo.memory.budget import GB, readable
from grpo.workbench.find_max import INCREMENT, Checked, line_bytes
from grpo.workbench.line import (
    LEAST_FOR_A_LINE,
    MARGIN_REASONS,
    Line,
    first_outlier,
    fit_line,
    safety_margin,
)
from grpo.workbench.pictures import picture
from grpo.workbench.settings import FindMax
from grpo.workbench.sizes import SizeResult

SAFE_SHARE = 0.8
ALL_THAT_IS_FREE = " --memory-utilization 1"
"""The trials may use all memory that is free; a plan within less would split the batch."""
CARDS = (2, 4, 8)
"""Numbers of cards that the safe size is multiplied for."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """Peak bytes of the sizes that fitted, the sizes that did not, and the device they were tried on.

    flags: of train_lean.py, that the sizes hold with. no_command: why none of its commands does that.
    """

    peaks: Mapping[int, float]
    failed: Sequence[int]
    total_bytes: float
    margin_bytes: float
    margin_reason: str
    multiple: int
    at_most: int | None = None
    flags: str = ""
    no_command: str | None = None

    @property
    def maximum(self) -> int:
        """The largest size that fitted."""
        return max(self.peaks)

    @cached_property
    def line(self) -> Line | None:
        """The line through all sizes that fitted; None for fewer than four, or where it does not rise."""
        return fit_line(self.peaks) if len(self.peaks) >= LEAST_FOR_A_LINE else None

    def facts(self) -> list[Row]:
        """A finding: a figure, and how far it can be trusted."""
        total, line, peak = self.total_bytes, self.line, self.peaks[self.maximum]
        capped = self.at_most is not None and self.maximum + self.multiple > self.at_most
        note = "no larger one was to be tried: --max-batch-size" if capped else ""
        facts: list[tuple[str, object, str]] = [("largest batch that fitted", self.maximum, note)]
        facts.append(("peak", readable(peak), f"of {readable(total)} that may be used"))
        facts.append(("headroom", readable(total - peak), f"{(total - peak) / total:.0%} of that"))
        if self.no_command is not None:
            facts.append(("command", "none", f"of train_lean.py: {self.no_command}"))
        if line is None:
            note = f"over the batch size: it takes {LEAST_FOR_A_LINE} sizes that fit, and peaks that rise"
            facts.append(("line", "none", note))
        else:
            facts += self._line_facts(line)
        return [{"what": what, "value": value, "note": note} for what, value, note in facts]

    def _line_facts(self, line: Line) -> list[tuple[str, object, str]]:
        total, margin, bend = self.total_bytes, self.margin_bytes, first_outlier(self.peaks)
        slope = f"{line.bytes_per_sample / GB:.4g} × (batch - {line.first})"
        note = "a line throughout"
        if bend is not None:
            note = f"no line from {bend} on: the sizes below it foretell another peak"
        facts: list[tuple[str, object, str]] = [
            ("line, GB", f"{line.start_bytes / GB:.2f} + {slope}", f"through {len(self.peaks)} sizes"),
            ("R²", f"{line.r_squared:.4f}", note),
            ("margin", readable(margin), f"{self.margin_reason}: within it is a risk"),
        ]
        if self.failed:
            first, note = min(self.failed), "as the line says"
            if (needed := total - line(first)) > 0:
                enough = "is enough" if margin >= needed else "was not"
                share = f"{readable(needed)} ({needed / total:.1%})"
                note = f"a margin of {share} would have told; this one {enough}"
            facts.append((f"{first} on the line", readable(line(first)), f"it ran out of memory: {note}"))
        return facts

    def next_sizes(self) -> list[Row]:
        """After the maximum: the next two, those at risk (first and last), and the first ruled out."""
        line, step = self.line, self.multiple
        if line is None:
            return []
        if self.maximum >= 4 * INCREMENT:
            step *= -(-INCREMENT // step)  # the next multiple of it
        limits = (self.total_bytes - self.margin_bytes, self.total_bytes)
        safe, possible = (max(0, (line.largest(limit) - self.maximum) // step) for limit in limits)
        steps = {*range(1, min(safe, 2) + 1), possible + 1}
        if possible > safe:
            steps |= {safe + 1, possible}
        rows = []
        for size in (self.maximum + step * count for count in sorted(steps)):
            risk = line.risk(size, self.total_bytes, self.margin_bytes)
            risk = "yes, tried" if size in self.failed else risk
            rows.append({"batch": size, "GB on the line": f"{line(size) / GB:.2f}", "out of memory?": risk})
        return rows

    def recommended(self) -> list[Row]:
        """Full, safe and accumulated sizes, and the safe one on several cards; each with its command."""
        full, safe = self.maximum, int(SAFE_SHARE * self.maximum)
        wanted = [("full", full, 1, 1), ("safe", safe, 1, 1), ("accumulated", full // 2, 2, 1)]
        rows: list[Row] = []
        for use, size, passes, cards in [*wanted, *(("safe", safe, 1, count) for count in CARDS)]:
            at_once = max(self.multiple, size // self.multiple * self.multiple)
            batch = at_once * passes * cards
            row = {"use": use, "cards": cards, "rows at once": at_once, "accumulate": passes, "batch": batch}
            if self.no_command is None:
                several = f"accelerate launch --num_processes {cards} train_lean.py"
                split = f" --train-rows {at_once}" if passes > 1 else ""
                launch = several if cards > 1 else command_hint("train")
                row["command"] = (
                    f"{launch} --batch-size {batch}{split}{ALL_THAT_IS_FREE} {self.flags}".rstrip()
                )
            rows.append(row)
        return rows

    def draw(self, file: Path) -> None:
        """Peaks over the batch size with their line, and the device."""
        with picture(file, (7, 4.2)) as axes:
            low, total = self.total_bytes - self.margin_bytes, self.total_bytes
            axes.axhspan(low / GB, total / GB, color="tab:orange", alpha=0.2, label="margin")
            axes.axhline(total / GB, color="tab:red", linewidth=1, label="device")
            if self.line is not None:
                ends = [min(self.peaks), max(row["batch"] for row in self.next_sizes())]
                axes.plot(ends, [self.line(size) / GB for size in ends], color="tab:gray", label="line")
            axes.plot(list(self.peaks), [peak / GB for peak in self.peaks.values()], "o", label="measured")
            for size in self.failed:
                axes.axvline(size, color="tab:red", linestyle=":", linewidth=1)
                words = f" {size}: out of memory"
                axes.annotate(words, (size, 0), rotation=90, va="bottom", ha="right", fontsize=8)
            axes.set(xlabel="batch size", ylabel="GB (2**30 bytes)", ylim=(0, None))
            axes.set_title(f"Largest batch that fitted: {self.maximum}", loc="left")
            axes.legend(frameon=False, ncols=2)


def findings(checked: Checked, trials: Sequence[SizeResult], flags: str = "") -> Findings:
    """Returns the findings of trials. flags: of train_lean.py. ValueError where no size fitted."""
    settings, usable = checked.settings, checked.usable_bytes
    for trial in trials:
        if trial.status not in ("ok", "out of memory"):
            raise UserError(
                f"batch {trial.batch_size} {trial.status}, and not for want of memory: {trial.message}"
            )
    peaks = {trial.batch_size: float(line_bytes(trial)) for trial in trials if trial.is_finished}
    if not peaks:
        smallest = min(trials, key=lambda trial: trial.batch_size)
        raise UserError(
            f"not even a batch of {smallest.batch_size} fits in {readable(usable)} "
            f"({smallest.message}): give a smaller model, shorter texts, --gradient-checkpointing full, or "
            "more memory."
        )
    return Findings(
        peaks=peaks,
        total_bytes=usable,
        failed=[trial.batch_size for trial in trials if not trial.is_finished],
        margin_bytes=safety_margin(usable, checked.device_type),
        margin_reason=MARGIN_REASONS.get(checked.device_type, MARGIN_REASONS["accelerator"]),
        multiple=settings.multiple,
        at_most=settings.train.max_batch_size,
        flags=flags,
        no_command=checked.no_command,
    )


def flags_of(train: Config) -> str:
    """Returns the flags that train_lean.py needs besides the batch size, to do what was tried."""
    defaults, words = to_plain(Config()), []
    for name, value in to_plain(train).items():
        if value == defaults[name] or name in FindMax.MANAGED_FLAGS:
            continue
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", *map(str, value if isinstance(value, list) else [value])]
    return shlex.join(words)
