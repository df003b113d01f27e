"""Tokens do not depend on how many rows decode at once, in what order, or beside whom (I2).

In float64 not one; how few differ in the precisions that people run is counted at the end.
"""

import pytest
import torch
from conftest import ARCHITECTURES, CPU, examples, let_norms_be_exact
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo.config.groups import SamplingSettings
from grpo.model.load import load_policy
from grpo.model.weights import RolloutModel
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.types import Batch, Prompt

G, LENGTH = 3, 12
N = 4 * G
SAMPLING = SamplingSettings(max_new_tokens=LENGTH)


def sample(policy, prompts, uniforms, *, rows: int) -> Batch:
    return rollout(policy.model, policy.tokenizer, prompts, uniforms, SAMPLING, rows=rows)


@pytest.fixture(scope="module")
def references(model_folders, prompts):
    """For each architecture the policy, its uniforms, and what comes out when all rows decode together."""
    made = {}
    for name in ARCHITECTURES:
        policy = load_policy(str(model_folders[name]), CPU, "fp64")
        let_norms_be_exact(policy.model)
        uniforms = step_uniforms(N, LENGTH, seed=0, step=1)
        sampled = sample(policy, prompts, uniforms, rows=N)
        assert len(sampled.lengths.unique()) > 4 and 2 < sampled.terminated.sum() < N
        made[name] = policy, uniforms, sampled
    return made


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@examples(5)
@given(rows=st.integers(1, 2 * N), order=st.permutations(range(4)))
@example(rows=1, order=[0, 1, 2, 3])
@example(rows=G, order=[3, 2, 1, 0])
@example(rows=N, order=[2, 0, 3, 1])
def test_i2_tokens_do_not_depend_on_rows_or_order(references, prompts, architecture, rows, order):
    """As long as each row keeps its uniforms. Groups end at different times, so `keep` is at work."""
    policy, uniforms, reference = references[architecture]
    places = torch.tensor([group * G + row for group in order for row in range(G)])
    sampled = sample(policy, [prompts[group] for group in order], uniforms[places], rows=rows)
    expected = reference.select(places)
    assert torch.equal(sampled.ids, expected.ids)
    assert torch.equal(sampled.lengths, expected.lengths)
    assert torch.equal(sampled.terminated, expected.terminated)
    assert sampled.texts == expected.texts
    assert torch.allclose(sampled.sampler_logp, expected.sampler_logp, atol=1e-12, rtol=0)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_i2_tokens_do_not_depend_on_who_is_beside_them(references, prompts, architecture):
    """Each prompt alone, and with others that end early or late."""
    policy, uniforms, reference = references[architecture]
    for groups in ([0], [1], [2], [3], [1, 3], [0, 2, 3]):
        places = torch.tensor([group * G + row for group in groups for row in range(G)])
        sampled = sample(policy, [prompts[group] for group in groups], uniforms[places], rows=100)
        assert torch.equal(sampled.ids, reference.select(places).ids)
        assert torch.equal(sampled.lengths, reference.lengths[places])


def test_i2_siblings_differ_and_so_do_steps(references, prompts):
    """Two groups of one prompt, too: uniforms belong to rows, not to texts."""
    policy, _, reference = references["gpt2"]
    assert len({tuple(ids.tolist()) for ids in reference.by_row(reference.ids)}) == N
    later = sample(policy, prompts, step_uniforms(N, LENGTH, seed=0, step=2), rows=N)
    assert not torch.equal(later.ids, reference.ids)
    twins = [Prompt("a", "P: 8/8/8/8/8/8/8/8 w - - 0 1", {})] * 2
    sampled = sample(policy, twins, step_uniforms(2 * G, LENGTH, seed=0, step=1), rows=100)
    assert sampled.texts[:G] != sampled.texts[G:]


def test_i2_a_row_that_has_ended_says_no_more(references):
    """After end-of-text: nothing, in tokens and text."""
    policy, _, reference = references["gpt2"]
    end = policy.tokenizer.eos_token_id
    for row, ids in enumerate(reference.by_row(reference.ids)):
        assert (ids[:-1] != end).all() and reference.terminated[row] == (ids[-1] == end)
        assert reference.terminated[row] or len(ids) == LENGTH
        assert reference.texts[row] == policy.tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(("precision", "bound"), [("fp32", 5), ("bf16", 200)])
def test_i2_few_tokens_differ_where_people_run_it(load, prompts, precision, bound):
    """Compares 10,000 tokens that two small models draw after the same text, 4 rows at once and 600; here of
    a quarter.

    `-s --hypothesis-profile=proof` prints how many of all.
    """
    drawn = different = 0
    prompts = prompts if settings.get_current_profile_name() == "proof" else prompts[:1]
    num_rows = 150 * len(prompts)
    uniforms, sampling = step_uniforms(num_rows, 60, seed=0, step=1), SamplingSettings(max_new_tokens=60)
    for architecture in ("gpt2", "llama"):
        policy = load(architecture, precision)
        model = RolloutModel(policy.model, policy.target.dtype).model
        few, many = (
            rollout(model, policy.tokenizer, prompts, uniforms, sampling, rows=rows) for rows in (4, 600)
        )
        for one, other in zip(few.by_row(few.ids), many.by_row(many.ids), strict=True):
            count = min(len(one), len(other))
            apart = (
                one[:count] != other[:count]
            ).nonzero()  # after its first difference a row is another text
            drawn += int(apart[0]) if len(apart) else count
            different += len(apart) > 0
    print(f"{precision}: {different} of {drawn + different} tokens differ")
    assert drawn > 15 * num_rows and different <= bound * num_rows / 600
