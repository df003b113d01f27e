"""Predicted memory against measured memory, over a grid of models, settings and shapes."""

import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from loguru import logger
from rich import box
from rich.table import Table
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from benchmarks.real_phases import (
    CPU,
    RealPhases,
    Setting,
    allocator_peak,
    own_meter,
    resident_peak,
)
from benchmarks.speed_work import QWEN
from grpo.config.groups import Checkpointing
from grpo.memory import Predictor, Shape
from grpo.model.load import load_config
from grpo.model.target import compute_dtype
from grpo.plan.build import TracedFit
from grpo.plan.trace import PHASES, PhaseTracer
from grpo.plan.workload import resident_parts, scratch_bytes

LONGEST = (120, 256)
"""Prompt and new tokens that fits are made for."""
BARS = {"uncalibrated": 0.05, "calibrated": 0.015}
"""P95 of the whole footprint's relative error, at most."""


@dataclass(frozen=True)
class Cells:
    """A setting and the shapes that are tried with it; `calibration` are other ones."""

    kind: str
    setting: Setting
    shapes: Sequence[Shape]
    calibration: Sequence[Shape]
    phases: Sequence[str] = PHASES


@dataclass(frozen=True)
class PredictionTrial:
    """One phase at one shape. Bytes beyond what exists between phases, which is `resident_bytes`."""

    kind: str
    setting: str
    phase: str
    rows: int
    prompt_tokens: int
    new_tokens: int
    resident_bytes: int
    true_bytes: int
    rss_bytes: int
    uncalibrated_bytes: float
    calibrated_bytes: float
    uncalibrated_error_bytes: float
    calibrated_error_bytes: float

    def error(self, how: str, *, whole: bool) -> float:
        """Signed, relative; of the whole footprint, or of what the phase adds."""
        predicted: float = getattr(self, f"{how}_bytes")
        return (predicted - self.true_bytes) / (self.true_bytes + (self.resident_bytes if whole else 0))

    def is_safe(self, how: str) -> bool:
        """Whether the stated error covers the truth."""
        predicted, error = getattr(self, f"{how}_bytes"), getattr(self, f"{how}_error_bytes")
        return bool(self.true_bytes <= predicted + error)


# -------------------------------------------------------------------------------------------- grid


def gpt2_config(**changes: int) -> PretrainedConfig:
    """GPT-2, 124 M unless changed, as `load_config` would have it."""
    return GPT2Config(
        activation_function="gelu_pytorch_tanh", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=0, eos_token_id=0, **changes,
    )  # fmt: skip


SMALL_SHAPES = tuple(
    Shape(*each)
    for each in (
        (8, 20, 16), (64, 20, 16), (8, 120, 256), (16, 60, 64), (64, 40, 32), (32, 120, 128), (64, 120, 64),
        (16, 20, 256), (64, 20, 128), (32, 60, 256),
    )
)  # fmt: skip
LARGE_SHAPES = (Shape(8, 20, 16), Shape(16, 60, 32), Shape(8, 120, 64), Shape(16, 20, 64))
PARTS_OF_GROUPS = (Shape(1, 60, 64), Shape(2, 120, 128), Shape(4, 20, 64))
CHECKPOINTING: dict[Checkpointing, str] = {
    "none": "", "selective": "selective checkpointing", "full": "full checkpointing",
}  # fmt: skip
"""Each kind, and what it is called."""
CALIBRATION = (Shape(16, 48, 40), Shape(32, 90, 24), Shape(24, 30, 100))
LARGE_CALIBRATION = (Shape(8, 40, 24), Shape(16, 30, 16))
UNSEEN_SHAPES = (Shape(8, 150, 300), Shape(16, 150, 300))


def _variants(name: str, model: PretrainedConfig) -> Iterator[tuple[Setting, Sequence[str]]]:
    """Every setting, and the phases in which it differs from those before it."""
    for dtype in (torch.float32, torch.bfloat16):
        for checkpointing in CHECKPOINTING:
            for kl in (True, False):
                phases = PHASES if kl and checkpointing == "none" else ("learn", "learn split")
                yield Setting(name, model, dtype, checkpointing, kl), phases


def full_grid() -> Iterator[Cells]:
    """About a quarter of an hour on two cores. Settings take turns with the shapes: each gets a half."""
    for turn, (setting, phases) in enumerate(_variants("rook-tiny", load_config("rook-tiny"))):
        yield Cells("grid", setting, SMALL_SHAPES[turn % 2 :: 2], CALIBRATION, phases)
        if setting.kl:
            parts = [phase for phase in phases if phase != "learn"]
            yield Cells("part of a group", setting, PARTS_OF_GROUPS, CALIBRATION[:1], parts)
    for turn, (setting, phases) in enumerate(_variants("GPT-2 124 M", gpt2_config())):
        if setting.kl == (setting.checkpointing == "none"):  # half of them: each takes a minute
            yield Cells("grid", setting, LARGE_SHAPES[turn % 2 :: 2], LARGE_CALIBRATION, phases)
    wide = gpt2_config(n_layer=6, n_embd=384, n_head=6, vocab_size=97)
    llama = LlamaConfig(
        vocab_size=1000, hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    for name, model, shapes in (("Llama 4 x 192", llama, SMALL_SHAPES), ("Qwen 8 x 512", QWEN, LARGE_SHAPES)):
        for turn, (setting, phases) in enumerate(_variants(name, model)):
            if setting.kl:
                yield Cells("grid", setting, shapes[turn // 2 % 2 :: 2], LARGE_CALIBRATION, phases)
    for name, model in (("6 x 384, 97 words", wide), ("Llama 4 x 192", llama)):
        for setting, phases in _variants(name, model):
            if setting.kl:
                yield Cells("unseen", setting, UNSEEN_SHAPES, CALIBRATION[:2], phases)


def quick_grid() -> Iterator[Cells]:
    """About a minute: small models, two shapes each. In bf16 only where a processor has it."""
    tiny = load_config("rook-tiny")
    for dtype in dict.fromkeys((torch.float32, compute_dtype("auto", CPU))):
        setting = Setting("rook-tiny", tiny, dtype)
        yield Cells("grid", setting, (Shape(16, 60, 64), Shape(64, 20, 16)), CALIBRATION[:1])
        yield Cells(
            "part of a group", setting, (Shape(2, 60, 64),), CALIBRATION[:1], ("score", "learn split")
        )
    wide = Setting("6 x 384, 97 words", gpt2_config(n_layer=6, n_embd=384, n_head=6, vocab_size=97))
    yield Cells("unseen", wide, (Shape(8, 150, 300),), (Shape(8, 48, 40),), ("score", "learn"))


# ------------------------------------------------------------------------------------------ trials


def predict_trials(grid: Iterable[Cells], *, only: str = "") -> Iterator[PredictionTrial]:
    """Each cell of the grid, predicted before and after the calibrating steps, and run.

    only: words that a setting's description must hold.
    """
    for cells in grid:
        if not all(word in describe(cells.setting) for word in only.split()):
            continue
        logger.info("{} {}", cells.kind, describe(cells.setting))
        gc.collect()
        real = RealPhases(cells.setting)
        for phase in cells.phases:
            yield from _phase_trials(cells, phase, real)


def describe(setting: Setting) -> str:
    words = [setting.name, str(setting.compute_dtype).removeprefix("torch.")]
    words += [CHECKPOINTING[setting.checkpointing], "KL" if setting.kl else "no KL"]
    return " ".join(filter(None, words))


def _phase_trials(cells: Cells, phase: str, real: RealPhases) -> Iterator[PredictionTrial]:
    setting = cells.setting
    longest = Shape(setting.group_size, *LONGEST)
    work = setting.workload(longest)
    tracer = PhaseTracer(work.phase_settings())
    resident = sum(resident_parts(work, sum(each.numel() for each in real.model.parameters())).values())
    scratch = {phase: scratch_bytes(phase, setting.target)}
    calibration = [(shape, own_meter(real.prepare(phase, shape))) for shape in cells.calibration]

    @cache
    def predictors(longest: Shape) -> tuple[Predictor, Predictor]:
        fit = TracedFit(tracer, phase, longest, setting.group_size)
        fresh, calibrated = (Predictor({phase: fit}, scratch_bytes=scratch) for _ in range(2))
        for shape, measured in calibration:
            calibrated.observe(phase, shape, measured)
        return fresh, calibrated

    for shape in cells.shapes:
        is_part = shape.rows < setting.group_size  # and planned as if it were the longest
        fresh, calibrated = predictors(shape if is_part else longest)
        rss = resident_peak(real.prepare(phase, shape))
        true = allocator_peak(real.prepare(phase, shape))
        before, after = fresh.predict(phase, shape), calibrated.predict(phase, shape)
        yield PredictionTrial(
            cells.kind, describe(setting), phase, *shape[:3], resident, true, rss,
            before.peak_bytes, after.peak_bytes, before.error_bytes, after.error_bytes,
        )  # fmt: skip


def prediction_table(trials: Sequence[PredictionTrial]) -> Table:
    """Relative errors in percent, a line for each kind and phase: mean, P95 and maximum."""
    table = Table(
        "", "phase", "cells", "whole, before", "whole, after", "added, before", "added, after", "covered",
        "RSS, whole", box=box.MARKDOWN, title_justify="left",
        title="Relative error in percent (mean / 95 % of sizes / largest), before and after calibration",
    )  # fmt: skip
    for kind in dict.fromkeys(trial.kind for trial in trials):
        for phase in ("all", *PHASES):
            some = [trial for trial in trials if trial.kind == kind and phase in ("all", trial.phase)]
            if not some:
                continue
            cells = [
                summary([trial.error(how, whole=whole) for trial in some])
                for whole in (True, False)
                for how in BARS
            ]
            covered = " / ".join(f"{np.mean([trial.is_safe(how) for trial in some]):.0%}" for how in BARS)
            beside = summary([(t.rss_bytes - t.true_bytes) / (t.resident_bytes + t.true_bytes) for t in some])
            table.add_row(kind, phase, str(len(some)), *cells, covered, beside)
    return table


def summary(errors: Sequence[float]) -> str:
    sizes = np.abs(errors)
    return f"{100 * np.mean(errors):+.2f} / {100 * np.quantile(sizes, 0.95):.2f} / {100 * sizes.max():.2f}"


def prediction_verdicts(trials: Sequence[PredictionTrial]) -> dict[str, bool]:
    """Whether each bar is met, by the sentence that says so."""
    verdicts = {}
    for kind in dict.fromkeys(trial.kind for trial in trials):
        for how, bar in BARS.items():
            errors = [abs(trial.error(how, whole=True)) for trial in trials if trial.kind == kind]
            p95 = float(np.quantile(errors, 0.95))
            verdicts[f"{kind}: {how} P95 {p95:.2%} (bar {bar:.1%})"] = p95 <= bar
    return verdicts
