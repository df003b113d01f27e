"""Streams: every token once, every prompt as seldom as may be, and never more than rows were planned for."""

import math
import random

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from grpo.config.groups import SamplingSettings
from grpo.memory import PassSize
from grpo.memory.rows import num_tokens
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.scoring import micro_batches
from grpo.scoring.logprobs import score
from grpo.scoring.packing import largest_stream, pack, streams
from grpo.scoring.stream import make_stream
from grpo.types import Batch, Prompt, Step

G = 4


def step_of(lengths: list[list[int]], prompts: list[int]) -> Batch:
    """Groups of completions of these lengths behind prompts of those."""
    flat = torch.tensor(lengths).flatten()
    ids = torch.arange(len(flat) * int(flat.max() or 1)).view(len(flat), -1)
    return Batch.of_rows(
        [Prompt(str(place), "", {}) for place in range(len(prompts))],
        [[-1 - place] * size for place, size in enumerate(prompts)],
        ids,
        flat,
        terminated=torch.ones_like(flat, dtype=torch.bool),
        sampler_logp=torch.zeros(ids.shape),
        texts=[""] * len(flat),
    )


GROUPS = st.lists(
    st.tuples(st.lists(st.integers(0, 30), min_size=G, max_size=G), st.integers(1, 40)),
    min_size=1,
    max_size=6,
)


@examples(60)
@given(GROUPS, st.sampled_from([1, 2, 3, 4, 8, 12, 40]), st.booleans())
def test_every_row_is_in_one_stream_and_none_has_more_tokens_than_so_many_of_the_longest(
    groups, rows, of_equal_rows
):
    sampled = step_of(*map(list, zip(*groups, strict=True)))
    parts = pack(sampled, rows, of_equal_rows=of_equal_rows)
    assert sorted(row for part in parts for row in part) == [*range(len(sampled.lengths))]
    longest = PassSize(rows, max(1, int(sampled.lengths.max())), max(map(len, sampled.context_ids)))
    made = list(streams(sampled, rows, of_equal_rows=of_equal_rows))
    if of_equal_rows:
        assert {len(part) for part in parts[:-1]} <= {rows if rows < G else rows // G * G}
    else:
        assert all(len(stream) <= num_tokens(longest, G) for stream in made)
    for stream, part in zip(made, parts, strict=True):
        prompts = sum(len(sampled.context_ids[group]) for group in {row // G for row in part})
        assert len(stream) == prompts + sum(max(0, int(sampled.lengths[row]) - 1) for row in part)
    largest = largest_stream(sampled, rows, of_equal_rows=of_equal_rows)
    assert largest.computed >= max(map(len, made)) and largest.rows == min(rows, len(sampled.lengths))


@examples(60)
@given(GROUPS, st.integers(0, 99), st.booleans())
def test_what_a_stream_says_is_what_its_rows_say(groups, seed, masked):
    """Ids, positions, and from which state each token that is scored is predicted."""
    sampled = step_of(*map(list, zip(*groups, strict=True)))
    scored = torch.ones(len(sampled.ids), dtype=torch.bool)
    if masked:
        scored = torch.rand(len(scored), generator=torch.Generator().manual_seed(seed)) < 0.5
    found = torch.zeros_like(scored)
    for stream in streams(sampled, 2 * G, scored=scored):
        ids, positions = stream.ids[0], stream.positions[0]
        for token, state, target in zip(
            stream.tokens.tolist(), stream.states.tolist(), stream.targets.tolist(), strict=True
        ):
            row = int(sampled.row[token])
            place = token - int(sampled.offsets[row])
            prompt = sampled.context_ids[row // G]
            assert target == sampled.ids[token] and positions[state] == len(prompt) + place - 1
            assert ids[state] == (prompt[-1] if place == 0 else sampled.ids[token - 1])
        found[stream.tokens] = True
    assert torch.equal(found, scored)


def test_groups_stay_whole_where_they_fit_and_the_largest_stream_comes_first():
    """A group that alone is too much is parted; what fits is together, whatever its place in the step."""
    sampled = step_of([[9, 9, 9, 9], [30, 1, 1, 1], [2, 2, 2, 2], [9, 9, 9, 9]], [5, 5, 5, 5])
    longest = (5, 9)  # 41 tokens a group
    parts = pack(sampled, G, longest=longest)
    assert [sorted(part) for part in parts] == [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    parts = pack(sampled, 3 * G, longest=longest)
    assert [sorted({row // G for row in part}) for part in parts] == [[0, 1, 3], [2]]
    parts = pack(sampled, 2, longest=longest)  # 23 tokens: the row of 30 goes alone, and is as it is
    assert [4] in parts and [0, 1] in parts and [2, 3] in parts


def lognormal(groups: int, size: int, mean: float, cap: int, spread: float, draws: random.Random):
    """Lengths of completions with long tails; those of a group are alike, in part."""
    variance = math.log(1 + spread * spread)
    middle = math.log(mean) - variance / 2
    for _ in range(groups):
        shift = draws.gauss(0, 0.5 * math.sqrt(variance))
        yield [
            min(
                cap,
                max(8, int(draws.lognormvariate(middle + shift - variance / 8, math.sqrt(0.75 * variance)))),
            )
            for _ in range(size)
        ]


@pytest.mark.parametrize("rows", [8, 16, 32, 64])
@pytest.mark.parametrize(("mean", "cap", "spread"), [(600, 2048, 0.6), (1200, 4096, 0.7), (144, 512, 0.5)])
def test_with_long_tails_hardly_a_token_is_computed_that_is_not_needed(mean, cap, spread, rows):
    """512 rows: each own token and each prompt once, to 5 %; padded groups would take 1.5 to 1.9 times that.
    And streams are filled: a step takes few more of them than its tokens ask for."""
    draws, size = random.Random(0), 8
    lengths = list(lognormal(512 // size, size, mean, cap, spread, draws))
    prompts = [draws.randint(40, 400) for _ in lengths]
    flat = torch.tensor(lengths).flatten()
    sampled = step_of(lengths, prompts)
    made = list(streams(sampled, rows, longest=(400, cap)))
    needed = sum(prompts) + int(flat.sum())
    computed = sum(map(len, made))
    assert 0.98 * needed < computed <= 1.05 * needed
    room = num_tokens(PassSize(rows, cap, 400), size)
    assert len(made) <= 1.25 * needed / room + 1
    attended = sum(each.queries.numel() for stream in made for each in stream.attention.rectangles)
    assert attended <= 1.3 * computed


def test_rows_without_a_token_that_counts_are_there_all_the_same():
    """As of idle groups, which a process of a sharded model repeats."""
    stream = make_stream([[1, 2], [3]], [0, 1], [[], [4, 5, 6]], learned=[[], [False, True, False]])
    assert stream.ids.tolist() == [[1, 2, 3, 4]] and stream.row.tolist() == [1]
    assert stream.targets.tolist() == [5] and stream.states.tolist() == [3]
    nothing = make_stream([[1, 2]], [0], [[]])
    assert nothing.states.shape == (0,) and len(nothing.attention.rectangles) == 1


def test_scripts_of_earlier_versions_find_padded_rows(load, prompts):
    """`step.rollout`, its `completion_ids`, and `score` of `scoring/micro_batches.py`, (N, C) each."""
    policy, settings = load("gpt2", "fp64"), SamplingSettings(max_new_tokens=9)
    uniforms = step_uniforms(len(prompts) * 2, 9, seed=0, step=1)
    batch = rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=8)
    step = Step(1, {}, batch, torch.zeros(len(batch)), torch.zeros(len(batch)))
    assert step.rollout.completions == step.completions and step.rollout.prompt_ids == batch.context_ids
    options = {"rows": 4, "temperature": 1.0, "dtype": torch.float64}
    padded, packed = (
        micro_batches.score(policy.model, step.rollout, **options),
        score(policy.model, batch, **options),
    )
    assert padded.shape == step.rollout.completion_ids.shape == (len(batch), int(batch.lengths.max()))
    for row, (ids, logp) in enumerate(zip(batch.by_row(batch.ids), batch.by_row(packed), strict=True)):
        assert torch.equal(padded[row, : len(ids)], logp) and not padded[row, len(ids) :].any()
        assert torch.equal(step.rollout.completion_ids[row, : len(ids)], ids)
