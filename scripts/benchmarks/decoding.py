"""Sampling alone, of a model of Qwen's kind: our decoders, Hugging Face's generate with both caches."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import numpy as np
from rich import box
from rich.table import Table

from benchmarks.real_phases import RealPhases, Setting
from benchmarks.speed import Case, Outcome, race, ratio_text
from benchmarks.speed_work import QWEN
from benchmarks.speed_worker import Contender
from grpo.memory import Size, largest_multiple, peak_live_bytes
from grpo.plan.trace import TracedPhases
from grpo.rollout import decoder
from grpo.workbench.models import num_parameters

_CONTENDERS: tuple[Contender, ...] = ("sampling", "generic sampling", "static", "growing")
_BAR, _LEAST = 3.0, 1.0
"""Times as fast as the static cache: our goal, and what holds on any machine."""


def race_decoders(rows: int, rounds: int, folder: Path) -> Outcome:
    """So many completions at once: 128 tokens each, of prompts of 120."""
    case = Case(
        f"{rows} rows", "Qwen's kind without end", 120, rows, rounds, (_BAR, _BAR), batch_size=rows,
        max_new_tokens=128,
    )  # fmt: skip
    return race(case, folder, contenders=_CONTENDERS)


def decoding_table(outcomes: Sequence[Outcome]) -> Table:
    """Ratios are of the contender's seconds to our native decoder's."""
    table = Table("rows", "decoder", "ms a token", "against it", "process's peak, GB", box=box.MARKDOWN)
    for outcome in outcomes:
        for name, steps in outcome.steps.items():
            token = float(np.median([step.seconds for step in steps])) / outcome.case.max_new_tokens
            ratio = "" if name == outcome.base else ratio_text(*outcome.ratio(name))
            peak = f"{steps[-1].peak_bytes / 2**30:.2f}"
            table.add_row(str(outcome.case.batch_size), name, f"{1000 * token:.1f}", ratio, peak)
    return table


def decoding_verdicts(outcomes: Sequence[Outcome], *, goals: bool = True) -> dict[str, bool]:
    bar = _BAR if goals else _LEAST
    ratios = {outcome.case.name: outcome.ratio("static")[0] for outcome in outcomes}
    return {f"{name}: {ratio:.2f} times static (bar {bar:g})": ratio >= bar for name, ratio in ratios.items()}


class SamplingMemory(NamedTuple):
    """Bytes of tensors beside the weights at so many rows, and rows that fit into 8 GB with them."""

    decoder: str
    at_once: int
    counted: int
    predicted: int
    rows: int


def sampling_memory(at_once: int = 256) -> Iterator[SamplingMemory]:
    """Of both our decoders, for the same model and lengths. GRPO's other phases are not in it."""
    setting, size = Setting("Qwen's kind", QWEN, kl=False), Size(at_once, 128, 120)
    room = 8 * 2**30 - 4 * num_parameters(QWEN)
    for name, refused in (("native", set()), ("generic", {QWEN.model_type})):
        with mock.patch.object(decoder, "_refused", refused):
            counted = peak_live_bytes(RealPhases(setting).prepare("sample", size))
            traced = TracedPhases(setting.phase_settings())
            rows_in_8gb = largest_multiple(
                lambda rows: traced.added_bytes("sample", size._replace(rows=rows)) <= room,  # noqa: B023
                at_most=2**14, multiple=setting.group_size,
            )  # fmt: skip
            yield SamplingMemory(name, at_once, counted, traced.added_bytes("sample", size), rows_in_8gb)


def sampling_memory_table(found: Iterable[SamplingMemory]) -> Table:
    table = Table("decoder", "rows", "MB counted", "predicted", "rows in 8 GB", box=box.MARKDOWN)
    for each in found:
        sizes = (f"{size / 2**20:.0f}" for size in (each.counted, each.predicted))
        table.add_row(each.decoder, str(each.at_once), *sizes, str(each.rows))
    return table


def memory_verdicts(found: Iterable[SamplingMemory]) -> dict[str, bool]:
    return {
        f"{each.decoder}: {each.predicted / each.counted - 1:+.1%} off (at most 2 %)":
        abs(each.predicted / each.counted - 1) <= 0.02
        for each in found
    }  # fmt: skip
