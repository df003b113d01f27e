"""Traces of the phases, remembered in the user's cache directory, and formulas fitted to them."""

import hashlib
import importlib.metadata
import inspect
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import platformdirs
import torch
import transformers
from loguru import logger

from grpo.files import write_whole
from grpo.memory import Shape
from grpo.memory.fit import PhaseFit, align
from grpo.memory.shape import decoding_features, decoding_shapes, pass_features, pass_shapes
from grpo.model import cpu
from grpo.plan.trace.depth import SHALLOW, Log, extend, num_layers, with_layers
from grpo.plan.trace.fake import FakePhases, PhaseSettings
from grpo.plan.trace.quick import QuickFakeMode
from grpo.rollout.decoder import cache_tokens, joining_groups, prompt_places
from grpo.scoring.fused import what_is_fused
from grpo.waiting import one_by_one

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once, see `completion_logprobs`."""
_FOLDER = Path(__file__).parents[2]


class PhaseTracer:
    """Peak bytes that a phase adds, traced; remembered in the user's cache directory."""

    def __init__(
        self,
        settings: PhaseSettings,
        *,
        kind: type[FakePhases] = FakePhases,
        cache_folder: Path | None = None,
    ) -> None:
        """kind: the phases to trace, if others than a run's."""
        self._settings, self._kind = settings, kind
        self._phases: FakePhases | None = None
        self._mode = QuickFakeMode()
        self._shallow: list[FakePhases] | None = None
        folder = cache_folder or platformdirs.user_cache_path("grpo-lean") / "traces"
        self._file = folder / f"{_fingerprint(settings, kind)}.json"
        self._known: dict[str, Log] = _read(self._file)
        self._num_saved = len(self._known)
        self._announced = False

    def peak_bytes(self, phase: str, shape: Shape) -> int:
        """The most that `phase` holds beyond what exists between phases. KeyError for an unknown phase."""
        peak = max(num_bytes for _, num_bytes in self.trace(phase, shape))
        self._save()
        return peak

    def trace(self, phase: str, shape: Shape) -> Log:
        """Each operation of `phase` that allocates, and the bytes held while it runs."""
        key = _key(phase, shape)
        if key not in self._known:
            self._known[key] = self._trace(phase, shape)
        return self._known[key]

    def _trace(self, phase: str, shape: Shape) -> Log:
        layers = num_layers(self._settings.target.model_config)
        if self._shallow is None:
            # A sharded model's layers are not gathered and let go of in a loop that is alike everywhere.
            alike = self._settings.processes == 1 and self._fake().has_equal_layers
            shallow = SHALLOW if alike and layers > sum(SHALLOW) else ()
            self._shallow = [self._kind(_with_layers(self._settings, count), self._mode) for count in shallow]
        if self._shallow:
            shorter, longer = (phases.trace(phase, shape) for phases in self._shallow)
            if (extended := extend(shorter, longer, layers)) is not None:
                return extended
        return self._fake().trace(phase, shape)

    def rounded(self, phase: str, shape: Shape) -> Shape:
        """The next larger shape that memory follows a formula in: a static cache grows by blocks."""
        if not phase.startswith("sample"):
            return shape
        model, groups = self._settings.target.model_config, shape.rows // self._settings.group_size
        return shape._replace(
            prompt_tokens=prompt_places(model, shape.prompt_tokens, self._settings.target.device.type),
            new_tokens=cache_tokens(model, shape.new_tokens),
            joining_groups=joining_groups(model, groups) if phase == "sample split" else 0,
        )

    def _fake(self) -> FakePhases:
        if self._phases is None:
            self._phases = self._kind(self._settings, self._mode)
        return self._phases

    @property
    def num_parameters(self) -> int:
        """Of the model, without adapters."""
        return self._fake().num_parameters

    @property
    def trained_sizes(self) -> list[int]:
        """How many numbers each trained tensor has: the adapters', where there are any."""
        return self._fake().trained_sizes

    @property
    def frozen_bytes(self) -> int:
        """Of weights that have adapters beside them; 0 without any."""
        return self._fake().frozen_bytes

    def fit(self, phase: str, longest: Shape) -> Callable[[Shape], float]:
        """The phase's peak as a formula of the shape, good for shapes up to about `longest`."""
        if phase != "sample split":
            return self._fit(phase, longest)
        alone, joined = self._fit("sample", longest), self._fit(phase, longest)
        return lambda shape: joined(shape) if shape.rows > self._settings.group_size else alone(shape)

    def _fit(self, phase: str, longest: Shape) -> PhaseFit:
        group_size = self._settings.group_size
        features: Callable[[Shape], np.ndarray]
        if phase.startswith("sample"):
            shapes, features = decoding_shapes(longest, group_size=group_size), decoding_features
        else:
            shapes = pass_shapes(longest, group_size=group_size, chunk_tokens=CHUNK_TOKENS)
            features = partial(pass_features, chunk_tokens=CHUNK_TOKENS)
        shapes = [self.rounded(phase, shape) for shape in shapes]
        if not self._announced and any(_key(phase, shape) not in self._known for shape in shapes):
            logger.info("tracing memory for this shape, once: some seconds")
            self._announced = True
        moments = align(
            [self.trace(phase, shape) for shape in one_by_one(shapes, f"tracing memory: {phase}")]
        )
        self._save()
        return PhaseFit(list(zip(shapes, moments, strict=True)), features)

    def _save(self) -> None:
        """All at once: a file of many logs is long to write."""
        if len(self._known) == self._num_saved:
            return
        self._known = _read(self._file) | self._known  # others may have traced, too
        self._num_saved = len(self._known)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, json.dumps(self._known))
        except OSError as error:  # traced again next time, that is all
            logger.debug("traces are not kept: {}", error)


def _key(phase: str, shape: Shape) -> str:
    return f"{phase} {shape.rows} {shape.prompt_tokens} {shape.new_tokens}"


def _with_layers(settings: PhaseSettings, count: int) -> PhaseSettings:
    config = with_layers(settings.target.model_config, count)
    return replace(settings, target=replace(settings.target, model_config=config))


def _what_memory_minds(settings: PhaseSettings) -> PhaseSettings:
    """Settings that differ in numbers only share their traces: a coefficient takes up what another does."""
    sampling, loss = settings.sampling, settings.loss
    temperature = sampling.temperature if sampling.temperature in (0.0, 1.0) else 0.5
    return replace(
        settings,
        target=replace(settings.target, model_config=None, device=torch.device(settings.target.device.type)),  # type: ignore[arg-type]
        sampling=replace(sampling, max_new_tokens=1, temperature=temperature),
        loss=replace(loss, kl_coef=float(loss.kl_coef > 0), clip_range=0.2),
        lora=replace(settings.lora, lora_alpha=None, lora_merge=False),
    )


def _fingerprint(settings: PhaseSettings, kind: type[FakePhases]) -> str:
    """Of all that a trace depends on, the code that phases run included."""
    folders = ("distributed", "learning", "memory", "model", "plan/trace", "rollout", "scoring")
    sources = {path for name in folders for path in (_FOLDER / name).rglob("*.py")}
    sources |= {_FOLDER / "types.py", Path(inspect.getfile(kind))}
    parts = [
        torch.__version__,
        transformers.__version__,
        settings.target.model_config.to_json_string(),
        repr(_what_memory_minds(settings)),
        importlib.metadata.version("peft") if settings.lora.on else "",
        *cpu.what_is_on(),
        *what_is_fused(),
        str(torch.cpu._is_amx_tile_supported()),  # what attention in bf16 holds
        *(hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(sources)),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _read(file: Path) -> dict[str, Log]:
    try:
        known = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    good = isinstance(known, dict) and all(map(_is_log, known.values()))
    return known if good else {}  # else traced again


def _is_log(log: object) -> bool:
    """A list of an operation's name and bytes, of which there is at least one."""
    return (
        isinstance(log, list)
        and bool(log)
        and all(
            isinstance(entry, list)
            and len(entry) == 2
            and isinstance(entry[0], str)
            and isinstance(entry[1], int)
            for entry in log
        )
    )
