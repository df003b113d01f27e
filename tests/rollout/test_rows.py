"""Rows come and go: each takes a slot, and pages as its text grows; none of it changes a token (I2)."""

from unittest import mock

import pytest
import torch
from conftest import CONTEXT, CPU, examples, let_norms_be_exact
from families import made, shaped
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from grpo.config.groups import LoraSettings, SamplingSettings
from grpo.model.adapters import add_adapters
from grpo.model.load import ModelSource, Policy, load_policy
from grpo.rollout import static_cache
from grpo.rollout.arena import Arena
from grpo.rollout.lengths import MARGIN, CachePlan, lognormal_lengths, tokens_at_once
from grpo.rollout.places import Pool
from grpo.rollout.room import DecodeCapacity
from grpo.rollout.sample import Rollout, begin_rollout
from grpo.rollout.static_cache import StaticLayer, page_tokens
from grpo.rollout.tokens import step_uniforms
from grpo.types import Prompt

G, LENGTH, PAGE = 3, 40, 8
N = 4 * G
STOPS = "qQ", "PB"
CHAT = (
    "{% for each in messages %}<{{ each['role'] }}>{{ each['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(autouse=True)
def _small_pages(monkeypatch):
    monkeypatch.setattr(static_cache, "PAGE", PAGE)


def begin(
    kind: str, policies, *, rows: int, cache_tokens: float | None = None
) -> tuple[Rollout, list[Prompt]]:
    policy, prompts = policies[kind]
    settings = SamplingSettings(max_new_tokens=LENGTH, stop=STOPS if kind == "stop texts" else ())
    uniforms = step_uniforms(N, LENGTH, seed=0, step=1)
    options = {"rows": rows, "cache_tokens": cache_tokens}
    if kind in ("windows", "chat"):  # of models that rarely end a text
        options["ends"] = range(0, len(policy.tokenizer), 20)
    return begin_rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, **options), prompts


@pytest.fixture(scope="module")
def policies(model_folders, tokenizer, prompts):
    """Models and what they are asked."""

    def loaded(name: str, precision: str = "fp64") -> Policy:
        policy = load_policy(str(model_folders[name]), CPU, precision)
        let_norms_be_exact(policy.model)
        with torch.no_grad():  # texts end, some of them late
            policy.model.get_output_embeddings().weight[0] *= 0.55
        return policy

    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
    windows = made(AutoConfig.for_model(**shaped("gemma3_text").to_dict() | sizes))
    lora = loaded("llama")
    add_adapters(lora.model, LoraSettings(lora_rank=4))
    for name, parameter in lora.model.named_parameters():
        if "lora_" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    quantized = ModelSource(str(model_folders["gpt2"])).load(loaded("gpt2", "fp32").target, in_4bit=True)
    with torch.no_grad():
        quantized.model.get_output_embeddings().weight[0] *= 0.55
    chat = loaded("qwen")
    chat.tokenizer.chat_template = CHAT
    asked = [
        Prompt(
            f"{n}", f"What is best in {prompt.text}", {}, messages=[{"role": "user", "content": prompt.text}]
        )
        for n, prompt in enumerate(prompts)
    ]
    return {
        "plain": (loaded("gpt2"), prompts),
        "stop texts": (loaded("gpt2"), prompts),
        "windows": (Policy(windows, tokenizer, None), prompts),
        "lora": (lora, prompts),
        "4 bits": (quantized, prompts),
        "chat": (chat, asked),
    }


@pytest.fixture(scope="module")
def wholes(policies):
    """Tokens by kind where all rows decode together, with as many pages as they may need."""
    found = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(static_cache, "PAGE", PAGE)
        for kind in policies:
            sampling, prompts = begin(kind, policies, rows=N)
            sampling.finish()
            assert sampling.tokens_given_up == 0
            found[kind] = sampling.batch(prompts)
            assert len(found[kind].lengths.unique()) > 3 and found[kind].lengths.max() > 2 * PAGE
    return found


@pytest.mark.parametrize("kind", ["plain", "stop texts", "windows", "lora", "4 bits", "chat"])
@examples(4)
@given(rows=st.integers(1, N + 3), cache_tokens=st.floats(PAGE, LENGTH))
@example(rows=N, cache_tokens=PAGE)
@example(rows=5, cache_tokens=12)
@example(rows=1, cache_tokens=LENGTH)
def test_i2_tokens_depend_neither_on_slots_nor_on_pages_nor_on_rows_given_up(
    policies, wholes, kind, rows, cache_tokens
):
    """Nor on which prompts are there, of which there is room for twice as many as rows fill."""
    sampling, prompts = begin(kind, policies, rows=rows, cache_tokens=cache_tokens)
    seen = [row for rows in sampling for row in rows]
    assert sorted(seen) == [*range(N)]  # each once
    sampled, whole = sampling.batch(prompts), wholes[kind]
    if kind == "4 bits":  # which bitsandbytes multiplies in fp32 at best: a token of hundreds may differ
        assert sum(one == other for one, other in zip(sampled.texts, whole.texts, strict=True)) >= N - 2
    else:
        assert torch.equal(sampled.ids, whole.ids) and torch.equal(sampled.lengths, whole.lengths)
        assert torch.equal(sampled.terminated, whole.terminated) and sampled.texts == whole.texts
        assert torch.allclose(sampled.sampler_logp, whole.sampler_logp, atol=1e-12, rtol=0)
    if (kind, rows, cache_tokens) == ("plain", N, PAGE):  # a page for each row
        assert sampling.tokens_given_up > 0
    if rows == 1:
        assert sampling.tokens_given_up == 0


def rollout_of(model, lengths: list[int], new_tokens: int, *, group: int = 8, **options) -> Rollout:
    """A rollout of rows that end after so many tokens. Each token is equally likely, and 0 ends a text."""
    uniforms = torch.full((len(lengths), new_tokens), 0.5)
    for row, length in enumerate(lengths):
        uniforms[row, length - 1] = 0.0 if length < new_tokens else 0.5
    prompts, settings = [[1, 2, 3]] * (len(lengths) // group), SamplingSettings(max_new_tokens=new_tokens)
    return Rollout(model, None, prompts, uniforms, settings, ends=[0], **options)


@pytest.fixture
def stub(monkeypatch):
    """A model whose attention does nothing, and whose tokens are equally likely."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "num_attention_heads": 1, "num_hidden_layers": 1}
    sizes |= {"intermediate_size": 8, "max_position_embeddings": 8192}
    model = made(AutoConfig.for_model("llama", **sizes)).float()
    model.get_output_embeddings().weight.data.zero_()
    monkeypatch.setattr(StaticLayer, "attend", lambda self, query, *_: query)
    return model


def scaled(mean: int, most: int, monkeypatch) -> tuple[int, int]:
    """Lengths and pages a quarter as long; in `make proof` as they are."""
    by = 1 if settings.get_current_profile_name() == "proof" else 4
    monkeypatch.setattr(static_cache, "PAGE", 256 // by)
    return mean // by, most // by


@pytest.mark.parametrize(("mean", "most", "cv"), [(600, 2048, 0.6), (1200, 4096, 0.7)])
@pytest.mark.parametrize("slots", [64, 128, 512])
def test_linear_layers_see_little_but_rows_that_go_on(stub, monkeypatch, mean, most, cv, slots):
    """512 rows with tails, in few slots and in as many as there are rows."""
    mean, most = scaled(mean, most, monkeypatch)
    lengths = lognormal_lengths(512, mean, most, spread=cv)
    rows_seen = []

    def count(layer, inputs):
        if inputs[0].shape[-2] == 1:  # not of prompts
            rows_seen.append(inputs[0].shape[0])

    with stub.model.layers[0].mlp.up_proj.register_forward_pre_hook(count):
        sampling = rollout_of(stub, lengths, most, rows=slots)
        assert sampling.finish().lengths.tolist() == lengths
    slot_steps = sum(rows_seen) / sum(lengths)
    assert 0.98 < slot_steps < 1.05
    passes = len(rows_seen)
    assert passes < 1.1 * max(sum(lengths) / slots, max(lengths)) + max(lengths) * (slots < 512)


@pytest.mark.parametrize(("mean", "most", "cv"), [(600, 2048, 0.6), (1200, 4096, 0.7)])
@pytest.mark.parametrize(("longer", "twice"), [(1.0, 0.0), (1.5, 0.05)])
def test_few_tokens_are_sampled_twice_where_texts_turn_out_longer(
    stub, mean, most, cv, longer, twice, monkeypatch
):
    """Than those of the step before, by which pages are planned."""
    mean, most = scaled(mean, most, monkeypatch)
    plan = CachePlan(most)
    assert "tokens of the cache a row" in plan.see(lognormal_lengths(512, mean, most, spread=cv, seed=1), 64)
    assert plan.tokens < most / 2
    lengths = lognormal_lengths(512, longer * mean, most, spread=cv)
    sampling = rollout_of(stub, lengths, most, rows=64, cache_tokens=plan.tokens)
    assert sampling.finish().lengths.tolist() == lengths
    assert sampling.tokens_given_up <= twice * sum(lengths)
    if longer > 1:
        assert plan.see(lengths, 64) is not None and plan.see(lengths, 64) is None  # told once


@examples(50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 12))
def test_pages_in_use_are_what_lengths_say(lengths, rows):
    """By an arena that takes and gives back pages as it goes, token by token."""
    page, waiting, active, most = page_tokens(40), [*lengths], [], 0
    while waiting or active:
        while waiting and len(active) < rows:
            active.append([0, waiting.pop(0)])
        most = max(most, sum(done // page + 1 for done, _ in active))
        active = [[done + 1, length] for done, length in active if done + 1 < length]
    assert tokens_at_once(lengths, rows, 40) == pytest.approx(most * page / min(rows, len(lengths)))


def test_prompts_that_will_be_waited_for_are_encoded_together(stub):
    lengths = [length for _ in range(32) for length in lognormal_lengths(8, 12, 40, spread=0.6)]
    with mock.patch.object(Arena, "encode", autospec=True, side_effect=Arena.encode) as encode:
        rollout_of(stub, lengths, 40, rows=32).finish()
    counts = [len(call.args[1]) for call in encode.call_args_list]
    assert sum(counts) == 32 and counts[:3] == [4, 4, 4]  # as many as 32 rows have, and twice as many ahead
    assert len(counts) < 16


def test_rows_are_left_as_they_are_when_nobody_waits_any_more(policies, wholes):
    sampling, prompts = begin("plain", policies, rows=4)
    for number, _ in enumerate(sampling):
        assert 0 <= sampling.share_done <= 1
        if number == 2:
            sampling.stop()
    batch, whole = sampling.batch(prompts), wholes["plain"]
    assert number == 3 and 0 < batch.lengths.max() <= 5 and (batch.lengths[-4:] == 0).all()
    for found, ids in zip(batch.by_row(batch.ids), whole.by_row(whole.ids), strict=True):
        assert found.tolist() == ids[: len(found)].tolist()


@examples(100)
@given(st.lists(st.integers(0, 30), max_size=60))
def test_places_are_taken_from_the_front_and_gaps_close(numbers):
    pool, taken = Pool(12), set[int]()
    for number in numbers:
        if number % 2 and taken:
            place = sorted(taken)[number % len(taken)]
            pool.give_back(place)
            taken.remove(place)
        elif pool.num_free:
            place = pool.take()
            assert place == min(set(range(12)) - taken)
            taken.add(place)
        if number == 30:
            moves = pool.close_gaps()
            taken = {moves.get(place, place) for place in taken}
            assert taken == set(range(len(taken)))
        assert pool.taken == taken and pool.front == max(taken, default=-1) + 1


def test_a_room_has_pages_for_a_row_that_gets_as_long_as_it_may():
    with mock.patch.object(static_cache, "PAGE", 256):
        whole = DecodeCapacity.of(64, 20, 8, 100, 4096)
        assert (whole.page, whole.pages_per_row, whole.pages, whole.prompts) == (256, 16, 64 * 16, 20)
        assert (
            DecodeCapacity.of(64, 50, 8, 400, 512).prompts == 16 + 5
            and DecodeCapacity.of(64, 50, 8, 4000, 512).prompts == 16
        )
        assert DecodeCapacity.of(64, 20, 8, 100, 4096, cache_tokens=1000).pages == 250
        assert DecodeCapacity.of(4, 20, 8, 100, 4096, cache_tokens=256).pages == 16
        assert (
            DecodeCapacity.of(64, 64, 1, 100, 144).prompts == 64
            and DecodeCapacity.of(64, 200, 1, 100, 144).prompts == 72
        )
        assert [page_tokens(tokens) for tokens in (1, 48, 144, 256, 257, 300, 1000)] == [
            8,
            48,
            144,
            256,
            136,
            152,
            256,
        ]
    assert MARGIN > 1
