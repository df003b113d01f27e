"""Pretrain rook-tiny: a small GPT-2 on endgame lines, loss on the completions only.

Policy lines come labelled from a file (Stockfish is slow), environment lines are made on the fly
and never repeat. Matrices train with Muon, everything else with AdamW. Left out: several devices.
"""

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from loguru import logger
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from benchmarks.positions import transition_lines
from benchmarks.tiny_tokenizer import build_tokenizer
from grpo.data import is_heldout
from grpo.model.target import choose_attention


@dataclass(frozen=True)
class PretrainConfig:
    """Pretrain a small RookWorld model from scratch."""

    policy_lines: Path
    """Labelled policy lines, as scripts/label_positions.py writes them."""
    output: Path
    """Folder for the model and its tokenizer."""
    steps: int = 1800
    """Optimizer steps of the learning rate's schedule."""
    stop_after: int | None = None
    """End before the schedule does: a model whose last, slow steps are left out has more to learn."""
    batch_tokens: int = 8192
    """Tokens a step, prompts included."""
    policy_share: float = 0.6
    """Share of policy lines among the lines."""
    learning_rate: float = 2e-3
    """Peak learning rate; falls to a tenth along a cosine."""
    warmup_steps: int = 100
    """Steps of linear warm-up."""
    weight_decay: float = 0.05
    """Decoupled weight decay of matrices."""
    layers: int = 4
    """Transformer blocks."""
    width: int = 256
    """Residual width; heads are 64 wide."""
    seed: int = 0
    """Of the weights, the order and the environment lines."""


@dataclass(frozen=True)
class TokenBatch:
    """ids, completion: (N, T), padded right; `completion` marks the tokens to be predicted."""

    ids: Tensor
    completion: Tensor


def build_model(config: PretrainConfig, tokenizer: PreTrainedTokenizerFast) -> GPT2LMHeadModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=len(tokenizer),
            n_positions=512,
            n_embd=config.width,
            n_layer=config.layers,
            n_head=config.width // 64,
            activation_function="gelu_pytorch_tanh",
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id,
        )
    )


def split_line(line: str) -> tuple[str, str]:
    """A line's prompt and its completion, cut where the trainer cuts them."""
    if line.startswith("P:"):
        cut = line.index(" M:")
    else:
        cut = [i for i, character in enumerate(line) if character == "+"][2] + 1
    return line[:cut], line[cut:]


def token_batches(
    lines: Iterator[str], tokenizer: PreTrainedTokenizerFast, batch_tokens: int, *, pool: int = 2048
) -> Iterator[TokenBatch]:
    """Batches of about `batch_tokens`, lines of like length together, in random order."""
    rng = random.Random(0)
    while True:
        chunk = list(itertools.islice(lines, pool))
        if not chunk:
            return
        prompts, completions = zip(*map(split_line, chunk), strict=True)
        rows = [
            (prompt, [*completion, tokenizer.eos_token_id])
            for prompt, completion in zip(
                tokenizer(list(prompts))["input_ids"],
                tokenizer(list(completions))["input_ids"],
                strict=True,
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


def completion_logits(model: GPT2LMHeadModel, batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Logits (K, V) of the completion tokens alone, and the tokens (K,)."""
    ids, wanted = batch.ids.to(model.device), batch.completion[:, 1:].to(model.device)
    inputs = ids[:, :-1]
    hidden = model.transformer(inputs, attention_mask=torch.ones_like(inputs)).last_hidden_state
    return model.lm_head(hidden[wanted]), ids[:, 1:][wanted]


@torch.no_grad()
def whole_right(model: GPT2LMHeadModel, batch: TokenBatch) -> float:
    """Share of lines whose every completion token is the most likely one: greedy exact match."""
    with torch.autocast("cpu", torch.bfloat16):
        logits, targets = completion_logits(model, batch)
    right = torch.ones_like(batch.completion[:, 1:])
    right[batch.completion[:, 1:]] = logits.argmax(-1) == targets
    return right.all(1).float().mean().item()


def mixed_lines(config: PretrainConfig) -> Iterator[str]:
    """Policy and environment lines in the configured mix, for ever; none held out."""
    policy = [line for line in config.policy_lines.read_text().splitlines() if line]
    assert not any(is_heldout(split_line(line)[0][3:]) for line in policy[:1000])
    environment = itertools.chain.from_iterable(
        transition_lines(10_000, seed=seed, heldout=False)
        for seed in itertools.count(1000 * (config.seed + 1))
    )
    rng = random.Random(config.seed)
    while True:
        rng.shuffle(policy)
        for line in policy:
            yield line
            while rng.random() > config.policy_share:
                yield next(environment)


def optimizers(model: GPT2LMHeadModel, config: PretrainConfig) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al. 2024) for the blocks' matrices, AdamW for embeddings, norms, biases."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".h." in n]
    rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and ".h." in n)]
    return [
        torch.optim.Muon(
            matrices,
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(rest, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def pretrain(config: PretrainConfig) -> None:
    """Train, report every 100 steps, and save in bf16 with the tokenizer."""
    torch.manual_seed(config.seed)
    tokenizer = build_tokenizer()
    model = build_model(config, tokenizer)
    model.set_attn_implementation(choose_attention(torch.device("cpu"), torch.bfloat16))
    logger.info("{:,} parameters", sum(p.numel() for p in model.parameters()))
    both = optimizers(model, config)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: (
                min(1.0, (step + 1) / config.warmup_steps)
                * (0.55 + 0.45 * torch.cos(torch.tensor(step / config.steps * torch.pi)).item())
            ),
        )
        for optimizer in both
    ]
    held = list(transition_lines(256, seed=1, heldout=True))
    (held_batch,) = token_batches(iter(held), tokenizer, 10**9)

    last_step = min(config.steps, config.stop_after or config.steps)
    start, tokens = time.perf_counter(), 0
    batches = token_batches(mixed_lines(config), tokenizer, config.batch_tokens)
    for step, batch in enumerate(itertools.islice(batches, last_step), start=1):
        with torch.autocast("cpu", torch.bfloat16):
            logits, targets = completion_logits(model, batch)
        loss = F.cross_entropy(logits.float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(both, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        tokens += batch.ids.numel()
        if step % 100 == 0 or step == last_step:
            seconds = time.perf_counter() - start
            logger.info(
                "step {}: loss {:.4f}, held-out transitions right {:.3f}, {:.1f} M tokens, {:.0f} tokens/s",
                step, loss.item(), whole_right(model, held_batch), tokens / 1e6, tokens / seconds,
            )  # fmt: skip
    save(model, tokenizer, config.output)


def save(model: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """A Hugging Face folder with bf16 weights."""
    bf16 = GPT2LMHeadModel(model.config)
    bf16.load_state_dict(model.state_dict())
    bf16.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
