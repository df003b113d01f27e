"""A model's answers to held-out prompts, scored."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.groups import SamplingSettings
from grpo.data.reward_functions import Scores
from grpo.errors import UserError
from grpo.evaluate.evaluation import Evaluation
from grpo.evaluate.scores import Column, score_completions
from grpo.logs.waiting import progress_bar
from grpo.rewards import EnginePool
from grpo.rollout.decoder import ArenaCache
from grpo.rollout.sample import begin_rollout
from grpo.rollout.tokens import step_uniforms
from grpo.types import TASKS, Batch, Prompt

EVALUATION_STEP = -1
"""The step whose uniforms evaluations sample with: none of training's."""


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    **options: Any,
) -> Evaluation:
    """Returns the scores of `score_heldout`, with the same options, as an `Evaluation`."""
    return Evaluation.of(prompts, score_heldout(model, tokenizer, prompts, **options))


def score_heldout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    engine: EnginePool | None = None,
    judge: Callable[[Batch], Scores] | None = None,
    **options: Any,
) -> dict[str, Column]:
    """Complete the prompts and score what the model wrote, see `answer_heldout` and `score_answers`."""
    answers = answer_heldout(model, tokenizer, prompts, engine=engine, **options)
    return score_answers(answers, engine=engine, judge=judge)


class Answers(NamedTuple):
    """A model's completions of held-out prompts."""

    batch: Batch
    order: list[int]
    """The prompts' places before they were sorted."""
    samples: int
    """Completions a prompt."""


def answer_heldout(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    *,
    settings: SamplingSettings,
    rows: int,
    seed: int,
    samples: int = 1,
    engine: EnginePool | None = None,
    reusable: ArenaCache | None = None,
) -> Answers:
    """Complete the prompts, about `rows` rows at once.

    samples: completions a prompt, from the same uniforms every time for a seed; a single one, greedy,
    where the temperature is 0. engine: begins to rank moves while the model writes. reusable: where to find
    the arena of an earlier evaluation, and to leave it for the next.
    """
    if not prompts:
        raise UserError("no prompts to evaluate: hold some out, or give more positions")
    if samples < 1:
        raise UserError(f"samples is {samples}: give at least 1")
    if settings.temperature == 0:
        samples = 1
    if engine is not None:
        for prompt in prompts:
            if prompt.task == "policy":
                engine.submit(prompt.columns["fen"])
    # Rows that decode together end together if they are of one task and like length. Longest first:
    # what does not fit into memory shows at once.
    order = sorted(range(len(prompts)), key=lambda i: (TASKS.index(prompts[i].task), -len(prompts[i].text)))
    uniforms = step_uniforms(len(prompts) * samples, settings.max_new_tokens, seed=seed, step=EVALUATION_STEP)
    uniforms = uniforms.view(len(prompts), samples, -1)[order].flatten(0, 1)  # (N, max_new_tokens)
    sorted_prompts = [prompts[i] for i in order]
    sampling = begin_rollout(
        model, tokenizer, sorted_prompts, uniforms, settings, rows=rows, reusable=reusable
    )
    with progress_bar("held-out prompts") as done:
        for _ in sampling:
            done(sampling.share_done)
    sampled = sampling.batch(sorted_prompts)
    return Answers(sampled, order, samples)


def score_answers(
    answers: Answers,
    *,
    engine: EnginePool | None = None,
    judge: Callable[[Batch], Scores] | None = None,
) -> dict[str, Column]:
    """Scores (B, samples) by column, NaN where there is none, which `Evaluation.of` takes.

    engine: ranks moves instead of labels. judge: what rewards say of the batch, which becomes the column
    `reward`, and one for each of them by TRL's name.
    """
    sampled = answers.batch
    scores = score_completions(sampled.row_prompts, sampled.texts, engine=engine)  # each (N,)
    if judge is not None:
        judgement = judge(sampled)
        names = ["reward", *(f"rewards/{name}/mean" for name in judgement.names)]
        columns = [judgement.rewards_where_scored, *judgement.table.T]
        scores |= {name: column.numpy() for name, column in zip(names, columns, strict=True)}
    back = np.argsort(answers.order)
    return {name: row.reshape(-1, answers.samples)[back] for name, row in scores.items()}


def interleave(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Scores of all prompts, from those of every n-th: of prompts[0::n], prompts[1::n] and so on."""
    lengths = [len(next(iter(part.values()), ())) for part in parts]
    samples = max(values.shape[1] for part in parts for values in part.values())
    names = dict.fromkeys(name for part in parts for name in part)
    columns = {name: np.full((sum(lengths), samples), np.nan) for name in names}
    for start, part in enumerate(parts):
        for name, values in part.items():
            columns[name][start :: len(parts)] = values
    return columns
