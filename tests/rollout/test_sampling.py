"""From logits to tokens: the inverse CDF at a uniform number that is a row's and a position's own."""

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st

from grpo.config.groups import SamplingSettings
from grpo.rollout.sample import rollout, stop_length
from grpo.rollout.tokens import sample_tokens, step_uniforms, truncate

ALMOST_ONE = 1 - 2**-24  # the largest number torch.rand returns in float32


def logits_of(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities]).log()


def sampled(logits: torch.Tensor, uniform: float, **options: float) -> tuple[int, float]:
    """A token and its log-prob."""
    tokens, logp = sample_tokens(logits, torch.tensor([uniform]), **{"temperature": 1.0, **options})
    return int(tokens), float(logp)


def test_a_token_is_the_inverse_cdf_in_the_order_of_ids():
    """Probabilities 0.2, 0.3, 0.5: the CDF is 0.2, 0.5, 1.0. A uniform on a step belongs to the next token:
    [0, 0.25) is token 0's, [0.25, 0.5) token 1's, so 0 never hits a token of no probability."""
    logits = logits_of(0.2, 0.3, 0.5)
    uniforms = (0.0, 0.19, 0.21, 0.49, 0.51, 0.99, ALMOST_ONE)
    assert [sampled(logits, uniform)[0] for uniform in uniforms] == [0, 0, 1, 1, 2, 2, 2]
    assert [sampled(torch.zeros(1, 4), uniform)[0] for uniform in (0.0, 0.25, 0.5, 0.75)] == [0, 1, 2, 3]
    assert [sampled(logits_of(0.0, 0.5, 0.0, 0.5), uniform)[0] for uniform in (0.0, 0.5)] == [1, 3]
    logits = torch.cat([logits_of(0.9, 0.1), logits_of(0.1, 0.9), logits_of(0.5, 0.5)])
    tokens, logp = sample_tokens(logits, torch.tensor([0.5, 0.5, 0.7]), temperature=1.0)
    assert tokens.tolist() == [0, 1, 1] and torch.allclose(logp, torch.tensor([0.9, 0.9, 0.5]).log())


def test_temperature_divides_the_logits_and_shows_in_the_log_prob():
    """Odds of 3:1 at temperature 0.5 are 9:1. At 0 it is the most likely token, the lower id of equals. The
    log-prob is of the distribution before truncation."""
    logits = logits_of(0.25, 0.75)
    assert sampled(logits, 0.09, temperature=0.5)[0] == 0
    assert sampled(logits, 0.11, temperature=0.5) == (1, pytest.approx(math.log(0.9)))
    assert sampled(logits_of(0.2, 0.4, 0.4), 0.99, temperature=0.0) == (1, pytest.approx(math.log(0.4)))
    assert sampled(logits_of(0.2, 0.3, 0.5), 0.0, top_k=1) == (2, pytest.approx(math.log(0.5)))


def test_logits_of_bf16_are_sampled_in_fp32_and_float64_keeps_its_log_probs():
    """1000 equal tokens: bf16 sums of 0.001 would stick at 0.25 or so, and the last ids never come."""
    tokens, logp = sample_tokens(torch.zeros(1, 1000).bfloat16(), torch.tensor([0.9995]), temperature=1.0)
    assert tokens.item() == 999 and logp.dtype == torch.float32
    logits = torch.tensor([[0.1, 0.2, 0.3]], dtype=torch.float64)
    _, logp = sample_tokens(logits, torch.tensor([0.0]), temperature=0.7)
    exact = [math.exp(x / 0.7) for x in (0.1, 0.2, 0.3)]
    assert logp.dtype == torch.float64
    assert logp.item() == pytest.approx(math.log(exact[0] / sum(exact)), rel=1e-14)


def test_nan_logits_give_some_token_with_a_nan_log_prob():
    """The step is then seen to be broken and is skipped; an index out of range would end the run."""
    tokens, logp = sample_tokens(torch.full((2, 5), torch.nan), torch.tensor([0.3, 0.9]), temperature=1.0)
    assert ((tokens >= 0) & (tokens < 5)).all() and logp.isnan().all()


def kept_by_hand(logits: list[float], top_k: int, top_p: float, min_p: float) -> set[int]:
    """Ids that stay: the k best, of these the fewest that hold top_p of their probability, and what is
    at least min_p times as probable as the best."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[: top_k or None]
    weights = [math.exp(logits[i]) for i in order]
    inside = [sum(weights[:place]) < top_p * sum(weights) for place in range(len(order))]
    likely = [weight >= min_p * max(weights) for weight in weights]
    return {i for i, *stays in zip(order, inside, likely, strict=True) if all(stays)}


# Multiples of ln 2 give many ties; shares of 1/3 or so never meet their sums.
LOGITS = st.lists(st.integers(-3, 3).map(lambda n: n * math.log(2)), min_size=1, max_size=8)


@examples(200)
@given(
    LOGITS,
    st.integers(0, 9),
    st.sampled_from([0.05, 0.317, 0.503, 0.701, 0.93, 1.0]),
    st.sampled_from([0.0, 0.1, 0.3, 0.7]),
)
def test_truncation_keeps_what_a_slow_implementation_keeps(logits, top_k, top_p, min_p):
    exact = torch.tensor([logits], dtype=torch.float64)
    masked = truncate(exact, top_k=top_k, top_p=top_p, min_p=min_p)[0]
    kept = kept_by_hand(logits, top_k, top_p, min_p)
    assert {i for i, value in enumerate(masked.tolist()) if value > -math.inf} == kept
    assert all(masked[i] == logits[i] for i in kept)  # and nothing else has changed


def test_of_equal_logits_the_lower_ids_stay_and_rows_are_truncated_each_by_itself():
    assert truncate(torch.zeros(1, 5), top_k=2).isfinite().tolist() == [[True, True, False, False, False]]
    assert truncate(torch.zeros(1, 4), top_p=0.5).isfinite().tolist() == [[True, True, False, False]]
    big = truncate(torch.zeros(2, 5000), top_k=7)  # an unstable sort shows on long rows
    assert big.isfinite().nonzero()[:, 1].tolist() == [*range(7)] * 2
    kept = truncate(torch.cat([logits_of(0.7, 0.2, 0.1), logits_of(0.1, 0.3, 0.6)]), top_p=0.65).isfinite()
    assert kept.tolist() == [[True, False, False], [False, True, True]]


@examples(100)
@given(
    st.lists(st.floats(-8, 8), min_size=2, max_size=30),
    st.integers(0, 4),
    st.sampled_from([1e-6, 0.3, 0.9, 1.0]),
    st.sampled_from([0.0, 0.5, 1 - 2**-20, ALMOST_ONE, 1.0]),
)
def test_an_excluded_token_is_never_sampled(logits, top_k, top_p, uniform):
    """Not even by a uniform near 1 that rounding carries over the end of the CDF."""
    token, _ = sampled(torch.tensor([logits]), uniform, top_k=top_k, top_p=top_p)
    assert truncate(torch.tensor([logits]), top_k=top_k, top_p=top_p)[0, token].isfinite()


@pytest.mark.parametrize(
    ("vocabulary", "options"), [(4096, {}), (4097, {"top_k": 50}), (5120, {"top_p": 0.9}), (50_257, {})]
)
def test_a_large_vocabulary_is_searched_by_blocks_and_the_token_is_the_same(vocabulary, options):
    """Against one running sum over the whole vocabulary, in float64."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 3 * torch.randn(200, vocabulary, generator=generator, dtype=torch.float64)
    uniforms = torch.rand(200, generator=generator)
    uniforms[:2] = torch.tensor([0.0, ALMOST_ONE])
    tokens, logp = sample_tokens(logits, uniforms, temperature=1.0, **options)
    cdf = truncate(logits, **options).softmax(-1).cumsum(-1)
    expected = (cdf <= uniforms.double().unsqueeze(-1) * cdf[:, -1:]).sum(-1)
    assert torch.equal(tokens, expected.clamp(max=vocabulary - 1)) and len(tokens.unique()) > 50
    assert torch.allclose(logp, logits.log_softmax(-1)[torch.arange(200), tokens], atol=1e-12, rtol=0)


def test_a_large_vocabularys_excluded_tokens_are_never_hit():
    """Blocks without any probability, and single tokens, at both ends of each row's CDF.

    The fp32 sum of 50,000 probabilities is off by more than 2**-24 from 1.
    """
    logits = torch.randn(8, 50_257, generator=torch.Generator().manual_seed(0))
    logits[:, 40_000:] = -torch.inf
    assert (sample_tokens(logits, torch.full((8,), ALMOST_ONE), temperature=1.0)[0] < 40_000).all()
    logits = torch.full((4, 50_257), -torch.inf)
    for row, kept in enumerate(([0], [50_256], [255, 256], [300, 20_000, 50_000])):
        logits[row, kept] = -90.0
    for uniform in (0.0, 0.499999, 0.5, ALMOST_ONE, 1.0):
        tokens, logp = sample_tokens(logits, torch.full((4,), uniform), temperature=1.0)
        assert logits[torch.arange(4), tokens].isfinite().all() and logp.isfinite().all()


def test_every_seed_step_draw_row_and_position_has_its_own_uniform_the_same_every_time():
    """Whatever else is drawn, and however many rows follow."""
    keys = [(seed, step, draw) for seed in (0, 1, 11) for step in (0, 1, 11) for draw in (0, 1, 11)]
    numbers = torch.cat([step_uniforms(4, 5, seed=s, step=t, draw=d).flatten() for s, t, d in keys])
    assert len(numbers.unique()) > len(numbers) - 3  # float32 has 2**24 of them: a chance meeting or two
    first = step_uniforms(40, 7, seed=3, step=5)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    for rows in (8, 40):
        assert torch.equal(step_uniforms(rows, 7, seed=3, step=5), first[:rows])
    assert torch.equal(torch.get_rng_state(), state)  # nor do they draw on anyone else's
    assert first.shape == (40, 7) and first.dtype == torch.float32 and 0 <= first.min() <= first.max() < 1


def test_stop_texts_are_looked_for_in_what_has_come_since(load, prompts):
    """Each look decodes some tokens, however long the row is, and finds what a look at all of it finds."""
    policy, looks = load(), []
    decode = policy.tokenizer.decode
    settings = SamplingSettings(max_new_tokens=96)
    uniforms = step_uniforms(len(prompts) * 4, 96, seed=0, step=1)

    def sample(settings):
        sampled = rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=8)
        return [ids.tolist() for ids in sampled.by_row(sampled.ids)]

    def note(*ids, **options):
        looks.extend(map(len, ids))  # whole rows are decoded by name, in the end
        return decode(*ids, **options)

    with mock.patch("grpo.rollout.sample.end_tokens", lambda *_: ()):
        whole = sample(settings)
        texts = [decode(ids) for ids in whole]
        stops = tuple(text[at : at + 3] for text, at in zip(texts, (30, 55, 80, 100), strict=False))
        with mock.patch.object(policy.tokenizer, "decode", note):
            stopped = sample(replace(settings, stop=stops))
    assert len(stops) > 1 and sum(map(len, stopped)) < sum(map(len, whole))
    for found, ids in zip(stopped, whole, strict=True):
        assert found == ids[: stop_length(ids, policy.tokenizer, stops) or len(ids)]
    assert sum(length <= 8 + 3 * 4 + 4 for length in looks) > 0.5 * len(looks)


def test_a_stop_text_shortly_before_a_rows_own_end_counts(load, prompts):
    """Both come between two looks: the row ends at the first, as if it were looked at after each token."""
    policy, settings = load(), SamplingSettings(max_new_tokens=40)
    uniforms = step_uniforms(len(prompts) * 4, 40, seed=0, step=1)

    def sample(settings, ends):
        sampled = rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=8, ends=ends)
        return [ids.tolist() for ids in sampled.by_row(sampled.ids)]

    free = sample(settings, ())
    ends = [ids[4] for ids in free]  # each row has ended after five tokens, before the first look
    stops = tuple(policy.tokenizer.decode(ids[:3])[-2:] for ids in free)
    ended, stopped = sample(settings, ends), sample(replace(settings, stop=stops), ends)
    expected = [ids[: stop_length(ids, policy.tokenizer, stops) or len(ids)] for ids in ended]
    assert stopped == expected and sum(map(len, stopped)) < sum(map(len, ended))
