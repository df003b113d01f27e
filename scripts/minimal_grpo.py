"""GRPO from top to bottom in one file: a chess model learns to choose moves that go up the board.

    python scripts/minimal_grpo.py                 # a minute; --seconds 300 for five

It needs torch and transformers alone: copy it, and put your own model, prompts and reward in. Read
`grpo/trainer.py` second. Shapes: N completions of P prompt and at most C completion tokens, padded.
"""

import argparse
import copy
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path(__file__).parents[1] / "grpo" / "assets"
MODEL, PROMPTS = ASSETS / "rook-tiny", ASSETS / "positions" / "train.txt"
BATCH_SIZE, GROUP_SIZE, NEW_TOKENS, ROWS_AT_ONCE = 64, 8, 96, 16
LEARNING_RATE, CLIP_RANGE, KL_COEF = 1e-4, 0.2, 0.02
MOVE = re.compile("[a-h][1-8][a-h]([1-8])[qrbn]?")


class PaddedTexts(NamedTuple):
    """Prompts, padded on the left, with their completions, padded on the right."""

    ids: Tensor  # (N, P + C)
    attention_mask: Tensor  # (N, P + C)
    mask: Tensor  # (N, C), 1 at the tokens that were sampled, the one that ends a text among them


def up_the_board(completion: str) -> float:
    """The reward: the rank that a completion's move ends on, from 1/8 to 1; 0 without a move.

    A completion lists moves, their values, and behind B: the one it would play, such as "B: e7e8q".
    """
    move = MOVE.fullmatch(completion.rpartition("B:")[2].strip())
    return int(move[1]) / 8 if move else 0.0


@torch.no_grad()
def sample(model: Any, prompts: Sequence[Sequence[int]], end: int, new_tokens: int) -> PaddedTexts:
    """Samples a completion of each of N prompts, token by token over a cache of keys and values."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(prompt)) + [*prompt] for prompt in prompts])  # (N, P)
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    goes_on, is_sampled = torch.ones(len(ids), dtype=torch.bool), []
    new, cache = ids, None
    for _ in range(new_tokens):
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        output = model(
            new, attention_mask=seen, position_ids=positions, past_key_values=cache, use_cache=True
        )
        cache, chances = output.past_key_values, output.logits[:, -1].float().softmax(-1)  # (N, V)
        new = torch.multinomial(chances, 1).masked_fill(~goes_on[:, None], end)  # (N, 1)
        ids, is_sampled = torch.cat([ids, new], 1), [*is_sampled, goes_on]
        seen = torch.cat([seen, goes_on[:, None].long()], 1)
        goes_on = goes_on & (new[:, 0] != end)
        if not goes_on.any():
            break
    return PaddedTexts(ids, seen, torch.stack(is_sampled, 1).float())


def log_probs(model: Any, texts: PaddedTexts) -> Tensor:
    """Returns the log-prob (N, C) of each completion token."""
    positions = (texts.attention_mask.cumsum(1) - 1).clamp(min=0)
    logits = model(texts.ids, attention_mask=texts.attention_mask, position_ids=positions).logits
    start = texts.ids.shape[1] - texts.mask.shape[1]  # the logits at a token are of the one behind it
    all_log_probs = logits[:, start - 1 : -1].log_softmax(-1)  # (N, C, V)
    return all_log_probs.gather(2, texts.ids[:, start:, None]).squeeze(2)


def group_advantages(rewards: Tensor, group_size: int) -> Tensor:
    """Returns how much better each completion (N,) is than its siblings, in their standard deviations."""
    groups = rewards.view(-1, group_size)
    return ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1)


def token_losses(logp: Tensor, old_logp: Tensor, ref_logp: Tensor, advantages: Tensor) -> Tensor:
    """Returns the loss of each token (N, C): clipped gain, and KL to the reference (k3, Schulman 2020).

    The ratio that the KL is multiplied by makes its gradient that of the reverse KL.
    """
    ratio, gap = (logp - old_logp).exp(), ref_logp - logp
    gain = torch.minimum(
        ratio * advantages[:, None], ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE) * advantages[:, None]
    )
    return KL_COEF * ratio * (gap.exp() - gap - 1) - gain


def accumulate(model: Any, reference: Any, texts: PaddedTexts, advantages: Tensor, rows: int) -> None:
    """Adds the step's gradient to `.grad`, so many rows at once.

    The loss of a part is a sum divided by the tokens of the WHOLE step: the parts add up to the same gradient
    whatever `rows` is, and groups need not stay together once their advantages are known.
    """
    num_tokens = texts.mask.sum()
    for first in range(0, len(advantages), rows):
        part = slice(first, first + rows)
        own = PaddedTexts(*(tensor[part] for tensor in texts))
        with torch.no_grad():
            ref_logp = log_probs(reference, own)
        logp = log_probs(model, own)  # one update a step: the old log-probs are these, without a gradient
        losses = token_losses(logp, logp.detach(), ref_logp, advantages[part])
        ((losses * own.mask).sum() / num_tokens).backward()


def train(seconds: float) -> list[float]:
    """Returns the mean reward of each step, until the time is over."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()  # no dropout
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    lines = PROMPTS.read_text().splitlines()
    positions = [line.partition(" M:")[0] for line in lines if line.startswith("P: ")]
    means: list[float] = []
    began, choice = time.monotonic(), random.Random(0)
    while time.monotonic() - began < seconds:
        asked = choice.sample(positions, BATCH_SIZE // GROUP_SIZE)
        prompts = [tokenizer(text)["input_ids"] for text in asked for _ in range(GROUP_SIZE)]
        texts = sample(model, prompts, tokenizer.eos_token_id, NEW_TOKENS)
        sampled = texts.ids[:, -texts.mask.shape[1] :]
        answers = tokenizer.batch_decode(sampled, skip_special_tokens=True)
        rewards = torch.tensor([up_the_board(answer) for answer in answers])
        accumulate(model, reference, texts, group_advantages(rewards, GROUP_SIZE), ROWS_AT_ONCE)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        means.append(rewards.mean().item())
        print(f"step {len(means):3}: reward {means[-1]:.3f}, {texts.mask.sum(1).mean():.0f} tokens")
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="when to begin no further step")
    means = train(parser.parse_args().seconds)
    part = max(1, len(means) // 4)
    first, last = sum(means[:part]) / part, sum(means[-part:]) / part
    print(f"reward of the first quarter of {len(means)} steps {first:.3f}, of the last {last:.3f}")


if __name__ == "__main__":
    main()
