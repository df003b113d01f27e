"""GRPO from top to bottom, in one function: a chess model learns to choose moves that go up the board.

    python scripts/minimal_grpo.py                 # a minute; --seconds 300 for five

Read this first and `grpo/trainer.py` second. Left out, as each would stand before the algorithm: settings
from files, checkpoints and resuming, evaluation on held-out prompts, several processes, a copy of the weights
in bf16 to sample by, a step that is done again where memory runs out on the way, and a plan before the first
step. The trainer has them all.

Shapes: N completions in groups of G, of up to C tokens; see `grpo/types.py`.
"""

import argparse
import re
import time
from typing import Any

import torch

from grpo.config.groups import LossSettings, OptimizerSettings, SamplingSettings
from grpo.data import load_prompts
from grpo.data.reward_functions import RewardFunctions
from grpo.learning.advantages import group_advantages
from grpo.learning.loss import loss_counts, token_weights
from grpo.learning.objectives import finish_grpo, learn_tokens, to_device_together, tokens_of
from grpo.learning.optimizer import make_optimizer
from grpo.memory import Device, Fit, Size
from grpo.model.load import load_policy
from grpo.model.target import choose_device
from grpo.model.weights import frozen_copy
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.scoring.logprobs import score
from grpo.scoring.packing import streams

BATCH_SIZE, GROUP_SIZE, NEW_TOKENS = 64, 8, 96
MOVE = re.compile("[a-h][1-8][a-h]([1-8])[qrbn]?")


def up_the_board(completions: list[str], **columns: Any) -> list[float]:
    """The reward, in TRL's signature: the rank that a completion's move ends on, 1 for the last; 0 for none.

    A completion lists moves, their values, and behind B: the one it would play, such as "B: e7e8q".
    """
    moves = (MOVE.fullmatch(text.rpartition("B:")[2].strip()) for text in completions)
    return [int(move[1]) / 8 if move else 0.0 for move in moves]


def train(seconds: float) -> list[float]:
    """The mean reward of each step, until the time is over."""
    model, tokenizer, target = load_policy("rook-tiny", choose_device("auto"))
    reference = frozen_copy(model)
    prompts_to_come = load_prompts("bundled", policy_share=1.0, seed=0)
    rewards = RewardFunctions([up_the_board])
    sampling, loss = SamplingSettings(max_new_tokens=NEW_TOKENS), LossSettings(kl_coef=0.02)
    optimizer = make_optimizer(model, OptimizerSettings(learning_rate=1e-4))
    fit = Fit(Device(target.device), group_size=GROUP_SIZE)  # how many rows go through at once
    compute = {"temperature": sampling.temperature, "dtype": target.dtype}
    means: list[float] = []
    began = time.monotonic()
    while time.monotonic() - began < seconds:
        # Each prompt is answered G times. Every row and place has its own random number, so that the texts
        # are the same however many are sampled at once.
        prompts = prompts_to_come.draw(BATCH_SIZE // GROUP_SIZE)
        uniforms = step_uniforms(BATCH_SIZE, NEW_TOKENS, seed=0, step=len(means))  # (N, C)
        with fit.rows("sample", Size(BATCH_SIZE, NEW_TOKENS)) as rows:
            sampled = rollout(model, tokenizer, prompts, uniforms, sampling, rows=rows)

        # How good is each completion, and how much better than its siblings?
        scores = rewards(sampled).rewards  # (N,)
        advantages = group_advantages(scores, GROUP_SIZE)  # (N,)

        # How likely is each token to the model as it was at first? It is not to go far from that.
        size = Size(BATCH_SIZE, int(sampled.lengths.max()))
        with fit.rows("score", size) as rows:
            ref_logp = score(reference, sampled, rows=rows, **compute)  # (K,) of all tokens

        # What the loss depends on is fixed before the first backward pass: the sum over the parts is the
        # step's, whatever the parts are.
        counts = loss_counts(sampled, NEW_TOKENS)
        batch = sampled.with_columns(credit=advantages[sampled.row], ref_logp=ref_logp)
        weights = token_weights(batch.lengths, counts, loss.loss_type)[batch.row]
        sums = []
        with fit.rows("learn", size) as rows:
            for stream in streams(batch, rows):
                tokens = tokens_of(stream, batch, weights, target.exact_dtype)
                stream, tokens = to_device_together(stream, tokens, target.device)
                sums.append(learn_tokens(model, stream, tokens, settings=loss, **compute))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        metrics = finish_grpo(sums, counts)
        means.append(scores.mean().item())
        print(
            f"step {len(means):3}: reward {means[-1]:.3f}, KL {metrics['kl']:.4f}, "
            f"{sampled.lengths.double().mean():.0f} tokens, {rows} rows at once"
        )
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
