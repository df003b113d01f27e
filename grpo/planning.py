"""From a run's settings to its memory plan: what exists all along, what phases add, what fits.

Closed forms and traces come together here, for a run that is about to start (`make_memory`), for its
batch size where that is left to us (`find_batch_size`), and for the tables before and after.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from loguru import logger
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from grpo.config import Config, SettingsError
from grpo.decode import cache_tokens
from grpo.memory import (
    AdaptiveMemory,
    Budget,
    MemoryMonitor,
    PhaseSpec,
    Predictor,
    Shape,
)
from grpo.memory.budget import readable
from grpo.optimizer import moment_bytes, step_bytes
from grpo.phases import CHUNK_TOKENS, PHASES, PhaseSettings, PhaseTracer, split_name
from grpo.prompts import PromptSource
from grpo.world import largest_share

LONGEST_TEXTS = 64
"""Texts of most characters that are tokenized to find the one of most tokens."""
SCRATCH_BYTES = 2 * 2**20
"""oneDNN's workspace in bf16, up to a MB in what was measured, and that of CUDA's libraries."""


@dataclass(frozen=True)
class Workload:
    """What is to be planned for: the model, its settings, and the longest prompt in tokens."""

    config: Config
    model: PretrainedConfig
    attention: str
    compute_dtype: torch.dtype
    longest_prompt: int
    reference_here: bool
    """Whether the reference lives on the policy's device."""
    device_type: str = "cpu"
    processes: int = 1

    @property
    def shards(self) -> int:
        """Parts of the model, of which this process holds one."""
        return self.processes if self.config.shard else 1

    @property
    def rows_here(self) -> int:
        """Completions of a step that one process does, at most; as yet unknown, the most there may be."""
        config = self.config
        size = config.max_batch_size if config.batch_size == "auto" else config.batch_size
        return largest_share(size // config.group_size, self.processes) * config.group_size

    @property
    def new_tokens(self) -> int:
        return self.config.sampling.max_new_tokens

    def phase_settings(self) -> PhaseSettings:
        config = self.config
        return PhaseSettings(
            self.model, self.attention, self.compute_dtype, config.group_size, config.sampling,
            config.loss, config.gradient_checkpointing, self.device_type,
            scores_policy=config.num_iterations > 1 or config.kl_in_reward or self.reference_has_adapters,
            lora=config.lora, processes=self.shards,
        )  # fmt: skip

    @property
    def reference_has_adapters(self) -> bool:
        """Whether the reference is the policy with adapters of its own, not the policy without any."""
        return self.config.lora.on and self.config.reference_sync > 0

    @property
    def exact_bytes(self) -> int:
        """Of a number that is trained."""
        return 8 if self.compute_dtype == torch.float64 else 4


class TracedFit:
    """A phase's fit, made when first asked for; below a whole group, where rows share less, traced."""

    def __init__(self, tracer: PhaseTracer, phase: str, longest: Shape, group_size: int) -> None:
        self._tracer, self._phase, self._longest, self._group_size = tracer, phase, longest, group_size
        self._fit: Callable[[Shape], float] | None = None

    def __call__(self, shape: Shape) -> float:
        if shape.rows < self._group_size:
            return float(self._tracer.peak_bytes(self._phase, shape))
        if self._fit is None:
            self._fit = self._tracer.fit(self._phase, self._longest)
        return self._fit(self._tracer.rounded(self._phase, shape))


def make_memory(
    work: Workload,
    monitor: MemoryMonitor,
    budget: Callable[[], Budget],
    *,
    overhead_bytes: int | None = None,
    bias: float = 1.0,
) -> AdaptiveMemory:
    """The memory of a run, to plan by and to run phases with."""
    config = work.config
    tracer = PhaseTracer(work.phase_settings())
    longest = Shape(config.group_size, work.longest_prompt, work.new_tokens)
    traced = {phase: TracedFit(tracer, phase, longest, config.group_size) for phase in PHASES}
    sizes = [-(-size // work.shards) for size in tracer.trained_sizes]
    resident = resident_parts(work, tracer.num_parameters, sizes)
    gradients = {"gradients": work.exact_bytes * sum(sizes)}
    update = gradients["gradients"] + step_bytes(sizes, config.optimizer, work.device_type)
    specs = {
        "sample": PhaseSpec(
            "sample", split_name("sample"), config.rollout_rows, partial(_sample_parts, work)
        ),
        "score": PhaseSpec("score", "score", config.score_rows, partial(logits_parts, work)),
        "learn": PhaseSpec(
            "learn", split_name("learn"), config.train_rows,
            lambda shape: {**gradients, **logits_parts(work, shape)},
        ),
        "update": PhaseSpec("update", "update", None, lambda shape: gradients),
    }  # fmt: skip
    fits: dict[str, Callable[[Shape], float]] = {**traced, "update": lambda shape: update}
    scratch = scratch_bytes(work.compute_dtype, monitor.device)
    if not (config.uses_reference or config.num_iterations > 1 or config.kl_in_reward):
        del specs["score"]
    return AdaptiveMemory(
        specs, Predictor(fits, scratch_bytes=scratch, bias=bias), monitor,
        resident=lambda: resident, budget=budget, batch_size=work.rows_here, group_size=config.group_size,
        overhead_bytes=overhead_bytes, advice=lambda phase: advice(work, phase, tracer),
        replays=work.shards == 1,
    )  # fmt: skip


def plan_memory(
    work: Workload,
    monitor: MemoryMonitor,
    budget: Callable[[], Budget],
    *,
    overhead_bytes: int | None = None,
    bias: float = 1.0,
    agree: Callable[[int], int] = lambda rows: rows,
) -> tuple[Workload, AdaptiveMemory]:
    """The first plan; batch_size auto is a number in the workload that comes back.

    agree: from the rows that fit in this process to those of the process that holds least.
    """
    memory = make_memory(work, monitor, budget, overhead_bytes=overhead_bytes, bias=bias)
    if work.config.batch_size == "auto":
        size = work.processes * agree(find_batch_size(memory, work, budget()))
        logger.info("batch size {}: the largest that needs no splitting, of {}", size, budget())
        work = replace(work, config=replace(work.config, batch_size=size))
        memory = make_memory(work, monitor, budget, overhead_bytes=overhead_bytes, bias=bias)
    memory.replan(work.longest_prompt, work.new_tokens)
    if work.config.memory_limit:  # traced before the limit binds, for when a phase has to be split
        for phase in ("sample", "learn"):
            memory.footprint(phase, Shape(work.config.group_size, work.longest_prompt, work.new_tokens))
    return work, memory


def trace_phases(work: Workload) -> None:
    """Trace what plans are made from, so that whoever plans for the same later finds it done."""
    tracer = PhaseTracer(work.phase_settings())
    longest = Shape(work.config.group_size, work.longest_prompt, work.new_tokens)
    for phase in PHASES:
        tracer.fit(phase, longest)


def longest_prompt(source: PromptSource, tokenizer: PreTrainedTokenizerBase, config: Config) -> int:
    """Tokens of the longest prompt that is known beforehand: among the longest texts."""
    texts = [prompt.text for prompt in source.longest(LONGEST_TEXTS)]
    if not texts:
        return config.sampling.max_new_tokens
    return max(1, *map(len, tokenizer(texts, add_special_tokens=False)["input_ids"]))


def find_batch_size(memory: AdaptiveMemory, work: Workload, budget: Budget) -> int:
    """The largest multiple of the group size, up to one process's share, that no phase has to split."""
    config = work.config
    groups = max(1, config.max_batch_size // config.group_size // work.processes)
    size = groups * config.group_size
    for phase in memory.phases:
        fits = memory.largest_whole(phase, budget, size, work.longest_prompt, work.new_tokens)
        if fits < config.group_size:
            raise SettingsError(
                f"batch_size is auto, but {phase} does not hold one group of {config.group_size} at once in "
                f"{budget}: give --batch-size {config.group_size}, which is then done in parts."
            )
        size = min(size, fits)
    return size


# ----------------------------------------------------------------------------- bytes in closed form


def resident_parts(
    work: Workload, num_parameters: int, trained_sizes: Sequence[int] | None = None
) -> dict[str, int]:
    """Bytes that exist between phases: fp32 masters, AdamW's two moments, and copies beside them.

    num_parameters: of the model without adapters. trained_sizes: of each trained tensor; None: all weights.
    With adapters the base is in the compute dtype and serves sampler and reference, too.
    """
    num_parameters = -(-num_parameters // work.shards)
    exact, sizes = work.exact_bytes, trained_sizes or [num_parameters]
    moments = moment_bytes(sizes, work.config.optimizer, exact)
    if work.config.lora.on:
        adapters = exact * sum(sizes)
        base = work.compute_dtype.itemsize * num_parameters
        parts = {"weights": base + adapters, "optimizer": moments}
        return {**parts, "reference": adapters} if work.reference_has_adapters else parts
    parts = {"weights": exact * num_parameters, "optimizer": moments}
    if work.config.uses_reference and work.reference_here:
        parts["reference"] = exact * num_parameters
    if work.compute_dtype.itemsize < exact and work.shards == 1:  # shards sample with what they gather
        parts["sampler's copy"] = work.compute_dtype.itemsize * (num_parameters + _shared_head(work.model))
    return parts


def _shared_head(model: PretrainedConfig) -> int:
    """Parameters of a head that is the embedding too: the sampler's copy has one of its own."""
    text = model.get_text_config(decoder=True)
    return int(text.vocab_size * text.hidden_size) if text.tie_word_embeddings else 0


def kv_bytes_per_token(model: PretrainedConfig, dtype: torch.dtype) -> int:
    """2 · layers · kv_heads · head_dim · bytes: keys and values of one token of one row."""
    text = model.get_text_config(decoder=True)
    heads = text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return int(2 * text.num_hidden_layers * kv_heads * width * dtype.itemsize)


def scratch_bytes(dtype: torch.dtype, device: torch.device) -> int:
    """Room for what kernels hold unseen: none in fp32 on a CPU, where traces are exact."""
    exact = device.type == "cpu" and dtype in (torch.float32, torch.float64)
    return 0 if exact else SCRATCH_BYTES


def _sample_parts(work: Workload, shape: Shape) -> Mapping[str, int]:
    prompts = -(-shape.rows // work.config.group_size)
    tokens = prompts * shape.prompt_tokens + shape.rows * cache_tokens(work.model, shape.new_tokens)
    vocabulary = work.model.get_text_config(decoder=True).vocab_size
    return {
        "KV cache": tokens * kv_bytes_per_token(work.model, work.compute_dtype),
        "logits": shape.rows * vocabulary * (4 + work.compute_dtype.itemsize),
    }


def logits_parts(work: Workload, shape: Shape) -> Mapping[str, int]:
    vocabulary = work.model.get_text_config(decoder=True).vocab_size
    tokens = min(shape.scored_tokens or shape.rows * shape.new_tokens, CHUNK_TOKENS)
    return {"logits": tokens * vocabulary * 2 * work.exact_bytes}


# ------------------------------------------------------------------------------------------- advice


def advice(work: Workload, phase: str, tracer: PhaseTracer) -> str:
    """Settings to change when one row of `phase` does not fit, with the bytes each would save."""
    config = work.config
    row = Shape(1, work.longest_prompt, work.new_tokens)
    name = split_name(phase)

    def peak(settings: PhaseSettings, shape: Shape) -> int:
        same = settings == work.phase_settings()
        return (tracer if same else PhaseTracer(settings)).peak_bytes(name, shape)

    savings = {}
    if phase in PHASES:  # the optimizer's step minds no row
        now, half = peak(work.phase_settings(), row), max(1, work.new_tokens // 2)
        shorter = row._replace(new_tokens=half)
        savings[f"--max-new-tokens {half}"] = now - peak(work.phase_settings(), shorter)
    if phase == "learn" and not config.gradient_checkpointing:
        leaner = replace(work.phase_settings(), checkpoint=True)
        savings["--gradient-checkpointing"] = now - peak(leaner, row)
    resident = resident_parts(work, tracer.num_parameters, tracer.trained_sizes)
    if "reference" in resident and not config.lora.on:
        savings["--kl-coef 0, or --reference-device cpu"] = resident["reference"]
    if phase in PHASES and work.compute_dtype == torch.float32:
        lower = replace(work.phase_settings(), compute_dtype=torch.bfloat16)
        savings["--precision bf16"] = now - peak(lower, row)
    useful = {name: saved for name, saved in savings.items() if saved >= 2**20}
    ways = (f"{name} saves {readable(saved)}" for name, saved in useful.items())
    return "; ".join([*ways, "a smaller --model saves more"]) + "."
