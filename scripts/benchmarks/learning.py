"""Does it learn? Held-out quality before and after a run, and what supervised training gains instead."""

import itertools
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from loguru import logger
from rich.console import Console
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config import Config, read_config
from grpo.data import load_prompts
from grpo.data.load import POSITIONS
from grpo.evaluate import Evaluation
from grpo.evaluate.quality import ROWS, Quality
from grpo.learning.optimizer import make_optimizer
from grpo.model.load import Policy, RolloutModel, load_policy
from grpo.model.target import choose_device
from grpo.play.match import GAMES, score_against
from grpo.play.player import Player
from grpo.run.interrupt import stop_on_signal
from grpo.run.setup import open_run
from grpo.trainer import Trainer
from grpo.types import Prompt

DEMO_SETTINGS = Path(__file__).parents[2] / "grpo" / "assets" / "demo.yaml"


def demo_config(**changes: Any) -> Config:
    """The demo's settings, as the bundled YAML has them, but for changes that are not None."""
    given = {name: value for name, value in changes.items() if value is not None}
    return replace(read_config(DEMO_SETTINGS), **given)


def heldout_prompts(config: Config, count: int) -> list[Prompt]:
    """Up to `count` held-out prompts of each task."""
    return load_prompts(config.prompts, seed=config.seed, heldout_count=count).heldout


def train_grpo(config: Config, console: Console) -> tuple[Path, Policy, bool]:
    """Run the trainer; its folder, the trained policy, and whether Ctrl-C cut it short."""
    with stop_on_signal() as stop, open_run(config) as run:
        Trainer(run, console).train(stop)
        return run.folder, run.policy, stop.requested


def train_supervised(config: Config, *, minutes: float, learning_rate: float = 1e-4) -> Policy:
    """Plain language modelling on the bundled training lines for as long as GRPO took."""
    device = choose_device(config.device)
    policy = load_policy(config.model, device, config.precision)
    optimizer = make_optimizer(policy.model, config.optimizer)
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
    lines = POSITIONS.joinpath("train.txt").read_text().splitlines()
    rng = random.Random(config.seed)
    endless = itertools.chain.from_iterable(rng.sample(lines, len(lines)) for _ in itertools.count())
    end = time.monotonic() + 60 * minutes
    for step, batch in enumerate(token_batches(endless, policy.tokenizer, 8192)):
        if time.monotonic() > end:
            logger.info("supervised: {} steps in {:.1f} minutes", step, minutes)
            break
        lower = policy.target.dtype == torch.bfloat16
        with torch.autocast(device.type, torch.bfloat16, enabled=lower):
            logits, targets = completion_logits(policy.model, batch)
        F.cross_entropy(logits.float(), targets).backward()
        torch.nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return policy


@dataclass(frozen=True)
class TokenBatch:
    """ids, completion: (N, T), padded right; `completion` marks the tokens to be predicted."""

    ids: Tensor
    completion: Tensor


def split_line(line: str) -> tuple[str, str]:
    """A line's prompt and its completion, cut where the trainer cuts them."""
    if line.startswith("P:"):
        cut = line.index(" M:")
    else:
        cut = [i for i, character in enumerate(line) if character == "+"][2] + 1
    return line[:cut], line[cut:]


def token_batches(
    lines: Iterator[str], tokenizer: PreTrainedTokenizerBase, batch_tokens: int, *, pool: int = 2048
) -> Iterator[TokenBatch]:
    """Batches of about `batch_tokens`, lines of like length together, in random order."""
    rng = random.Random(0)
    while chunk := list(itertools.islice(lines, pool)):
        prompts, completions = zip(*map(split_line, chunk), strict=True)
        rows = [
            (prompt, [*completion, tokenizer.eos_token_id])
            for prompt, completion in zip(
                tokenizer(list(prompts))["input_ids"], tokenizer(list(completions))["input_ids"], strict=True
            )
        ]
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        batches: list[list[tuple[list[int], list[int]]]] = [[]]
        for row in rows:
            if (len(batches[-1]) + 1) * (len(row[0]) + len(row[1])) > batch_tokens:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        yield from (_collate(batch) for batch in batches if batch)


def _collate(rows: list[tuple[list[int], list[int]]]) -> TokenBatch:
    longest = max(len(prompt) + len(completion) for prompt, completion in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    completion_mask = torch.zeros(len(rows), longest, dtype=torch.bool)
    for i, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        ids[i, :end] = torch.tensor(prompt + completion)
        completion_mask[i, len(prompt) : end] = True
    return TokenBatch(ids, completion_mask)


def completion_logits(model: PreTrainedModel, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Logits (K, V) of the completion tokens alone, and the tokens (K,)."""
    ids, wanted = batch.ids.to(model.device), batch.completion[:, 1:].to(model.device)
    inputs = ids[:, :-1]
    hidden = model.base_model(inputs, attention_mask=torch.ones_like(inputs)).last_hidden_state
    return model.get_output_embeddings()(hidden[wanted]), ids[:, 1:][wanted]


def play_untrained(policy: Policy | None, untrained: Policy, config: Config, fens: Sequence[str]) -> Quality:
    """Column `GAMES`, in both modes: what a model scores against the untrained one from these positions.

    None: the untrained model itself, which scores a half by definition.
    """
    if policy is None:
        prompts = [Prompt(fen, fen, {}) for fen in fens]
        half = Evaluation.of(prompts, {GAMES: np.full((len(fens), 1), 0.5)})
        return Quality(half, half)

    def scored(temperature: float) -> Evaluation:
        settings = replace(config.sampling, temperature=temperature)
        players = [
            Player(RolloutModel(each.model, each.target.dtype).model, each.tokenizer, settings, rows=ROWS)
            for each in (policy, untrained)
        ]
        return score_against(*players, fens, seed=config.seed, at_once=ROWS)

    return Quality(scored(config.sampling.temperature), scored(0.0))
