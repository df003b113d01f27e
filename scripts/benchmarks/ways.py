"""How fast one model goes through in each of the ways that there are to run one.

The model can do all of them: rook-tiny, a GPT-2, over RookWorld's texts, which it answers and ends by itself.
"""

import platform
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.results import in_turns
from grpo.config.groups import SamplingSettings
from grpo.data import load_prompts
from grpo.data.maker import PromptBudget
from grpo.model.load import Policy, context_length, load_policy
from grpo.model.ways import DECODING, READING, choose_decoding, choose_reading
from grpo.rollout.sample import Rollout
from grpo.rollout.tokens import step_uniforms
from grpo.scoring.logprobs import token_logprobs
from grpo.scoring.packing import streams
from grpo.types import Batch, Prompt

GROUPS, GROUP, NEW_TOKENS = 4, 8, 144


class Speed(NamedTuple):
    """One way, its share of the first one's speed, and the range of that over the rounds."""

    what: str
    way: str
    speed: float
    slowest: float
    fastest: float


def speeds(rounds: int = 3) -> list[Speed]:
    """Times sampling, and one pass of learning, of 32 rows in each way, in turns."""
    policy = load_policy("rook-tiny", torch.device("cpu"), "fp32")
    room = PromptBudget(policy.tokenizer, context_length(policy.model.config), NEW_TOKENS)
    prompts = load_prompts("bundled", seed=0, heldout_share=0.0, room=room).draw(GROUPS)
    batch = _sample(policy, prompts)
    sampling = {way: partial(_sampled_in, policy, prompts, way) for way in DECODING}
    learning = {way: partial(_learned_in, policy, batch, way) for way in READING}
    found = [*_compare("sampling", sampling, rounds), *_compare("learning", learning, rounds)]
    choose_decoding(DECODING[0], policy.model.config)
    choose_reading(READING[0], policy.model.config)
    return found


def processor() -> str:
    """Returns what the figures were measured on."""
    return (
        f"{platform.machine()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )


def _compare(what: str, ways: dict[str, Callable[[], float]], rounds: int) -> list[Speed]:
    for run in ways.values():
        run()
    seconds = in_turns(ways, rounds)
    first = seconds[next(iter(ways))]
    ratios = {way: [a / b for a, b in zip(first, each, strict=True)] for way, each in seconds.items()}
    return [Speed(what, way, median(each), min(each), max(each)) for way, each in ratios.items()]


def _sample(policy: Policy, prompts: list[Prompt]) -> Batch:
    ids = [policy.tokenizer(prompt.text)["input_ids"] for prompt in prompts]
    uniforms = step_uniforms(GROUPS * GROUP, NEW_TOKENS, seed=0, step=0)
    sampling = Rollout(
        policy.model,
        policy.tokenizer,
        ids,
        uniforms,
        SamplingSettings(max_new_tokens=NEW_TOKENS),
        rows=GROUPS * GROUP,
        ends=[policy.tokenizer.eos_token_id],
    )
    sampling.finish()
    return sampling.batch(prompts)


def _sampled_in(policy: Policy, prompts: list[Prompt], way: str) -> float:
    choose_decoding(way, policy.model.config)  # type: ignore[arg-type]
    begun = time.perf_counter()
    with torch.no_grad():
        _sample(policy, prompts)
    return time.perf_counter() - begun


def _learned_in(policy: Policy, batch: Batch, way: str) -> float:
    choose_reading(way, policy.model.config)  # type: ignore[arg-type]
    begun = time.perf_counter()
    for stream in streams(batch, GROUPS * GROUP):
        token_logprobs(
            policy.model,
            stream,
            temperature=1.0,
            dtype=torch.float32,
            slope=lambda logp, _: torch.ones_like(logp),
        )
    policy.model.zero_grad()
    return time.perf_counter() - begun
