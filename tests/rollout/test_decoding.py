"""The sampler, the scorer, every decoder and a plain forward pass say the same of every token."""

from unittest import mock

import pytest
import torch
from conftest import ARCHITECTURES, CONTEXT, LONG_MOVE_PROMPT
from families import FAMILY, SIZES, made, shaped
from transformers import AutoConfig, AutoModelForCausalLM

from grpo.config.groups import BUNDLED, LoraSettings, SamplingSettings
from grpo.data.load import load_prompts
from grpo.memory.live import LiveBytes
from grpo.model.adapters import add_adapters, store_base
from grpo.model.load import ModelSource, Policy, end_names, end_tokens, load_policy
from grpo.model.ways import DECODING, choose_decoding, decoding_of
from grpo.model.weights import RolloutModel
from grpo.rollout import static_cache
from grpo.rollout.arena import Arena
from grpo.rollout.decoder import check_decoder, has_static_cache, open_arena
from grpo.rollout.growing import DynamicCacheArena
from grpo.rollout.room import DecodeCapacity
from grpo.rollout.sample import begin_rollout, rollout
from grpo.rollout.static_cache import StaticLayer
from grpo.rollout.tokens import step_uniforms
from grpo.scoring.logprobs import score, token_logprobs
from grpo.scoring.model_checks import check_scorer
from grpo.scoring.packing import streams
from grpo.types import Batch, Prompt

G, LENGTH = 3, 12
PLACES = 16  # of a page
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)


def sample(
    policy, prompts, *, rows=100, width=G, tokens=LENGTH, temperature=1.0, stop=(), step=1, **others
) -> Batch:
    """width: rows of a group."""
    settings = SamplingSettings(max_new_tokens=tokens, temperature=temperature, stop=stop)
    uniforms = step_uniforms(len(prompts) * width, tokens, seed=0, step=step)
    return rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=rows, **others)


def plain_logits(model, prompt_ids: list[int], completion_ids: list[int]) -> torch.Tensor:
    """Decodes as a textbook does: one row, one pass over all of it, no cache, no padding."""
    logits = model(input_ids=torch.tensor([prompt_ids + completion_ids]), use_cache=False).logits[0]
    return logits[len(prompt_ids) - 1 : -1]  # the state of a token predicts the next


def plain_rows(model, sampled: Batch, temperature: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Log-probs of each row's tokens, and the entropies at each."""
    rows = []
    for row, ids in enumerate(sampled.by_row(sampled.ids)):
        logits = plain_logits(model, sampled.context_ids[row // G], ids.tolist()) / temperature
        chances = torch.distributions.Categorical(logits=logits)
        rows.append((chances.log_prob(ids), chances.entropy()))
    return rows


def gradients(model) -> torch.Tensor:
    """All of them in fp64, and then none."""
    found = torch.cat([p.grad.double().flatten() for p in model.parameters()])
    model.zero_grad()
    return found


@EVERY_ARCHITECTURE
@pytest.mark.parametrize(
    ("precision", "temperature", "nats", "gradient"),
    [("fp64", 0.7, 1e-12, 1e-12), ("fp32", 1.0, 1e-4, 1e-5), ("bf16", 1.0, 0.6, 0.2)],
)
def test_the_scorer_equals_a_plain_forward_pass(
    load, prompts, architecture, precision, temperature, nats, gradient
):
    """By so many rows at once, and so do the sampler, entropies and gradients, also through the prompt that
    all rows of a group share: beside a plain pass in float64 on the same weights and tokens.

    The end of a text is scored like any other token. Padding has its id, so the mask cannot come from ids:
    garbage there is not read.
    """
    policy, exact = load(architecture, precision), load(architecture, "fp64").model
    options = {"temperature": temperature, "dtype": policy.target.dtype}
    sampler = RolloutModel(policy.model, policy.target.dtype).model
    sampled = sample(policy._replace(model=sampler), prompts, temperature=temperature)
    ended = sampled.terminated.nonzero().flatten()
    last = sampled.offsets[1:][ended] - 1
    assert len(ended) > 1 and (sampled.ids[last] == policy.tokenizer.eos_token_id).all()
    assert len(set(map(len, sampled.context_ids))) == 4 and len(sampled.lengths.unique()) > 2
    plain = plain_rows(exact, sampled, temperature)
    scored = [score(policy.model, sampled, rows=rows, **options) for rows in (1, 2, 5, 100)]
    for ours in (*scored, sampled.sampler_logp):
        assert (ours[last] < 0).all()
        for found, (logp, _) in zip(sampled.by_row(ours), plain, strict=True):
            assert (found - logp).abs().max() < nats
    weights = torch.randn(len(sampled.ids), generator=torch.Generator().manual_seed(1))
    pairs = zip(plain, sampled.by_row(weights), strict=True)
    sum((logp * own).sum() for (logp, _), own in pairs).backward()
    expected = gradients(exact)
    for batch in streams(sampled, 5):
        slopes = weights[batch.tokens]
        token_logprobs(policy.model, batch, slope=lambda _, part, own=slopes: own[part], **options)
        _, entropy = token_logprobs(policy.model, batch, entropy=True, **options)
        assert (entropy - torch.cat([each for _, each in plain])[batch.tokens]).abs().max() < nats
    assert (gradients(policy.model) - expected).norm() < gradient * expected.norm()


@pytest.mark.parametrize("in_4bit", [False, True])
def test_with_adapters_in_bf16_logits_are_as_fine_as_without(load, model_folders, prompts, in_4bit):
    """Near -100, where GPT-2's logits lie, bf16 knows halves only: the sampler centres its head."""
    differences = []
    for lora in (True, False):
        policy = load("gpt2", "bf16")
        if lora and in_4bit:
            policy = ModelSource(str(model_folders["gpt2"])).load(policy.target, in_4bit=True)
        with torch.no_grad():  # all states and the whole vocabulary have something in common
            policy.model.transformer.ln_f.bias[0] += 20
            policy.model.transformer.wte.weight[:, 0] -= 5
        if lora:
            add_adapters(policy.model, LoraSettings(lora_rank=4))
            store_base(policy.model, torch.bfloat16)
        sampled = sample(policy._replace(model=RolloutModel(policy.model, torch.bfloat16).model), prompts)
        scored = score(policy.model, sampled, rows=100, temperature=1.0, dtype=torch.bfloat16)
        differences.append((scored - sampled.sampler_logp).abs().mean().item())
    assert differences[0] < 3 * differences[1] + 0.01


def test_in_bf16_sampler_and_scorer_of_the_bundled_model_differ_by_less_than_a_thousandth_of_a_nat():
    """On average; with all of the sampler in bf16 it were 0.0026."""
    policy, prompts = (
        load_policy(BUNDLED, torch.device("cpu"), "bf16"),
        load_prompts("bundled", seed=0).draw(4),
    )
    sampler = RolloutModel(policy.model, torch.bfloat16).model
    settings = SamplingSettings(max_new_tokens=24)
    uniforms = step_uniforms(8, 24, seed=0, step=1)
    sampled = rollout(sampler, policy.tokenizer, prompts, uniforms, settings, rows=8)
    scored = score(policy.model, sampled, rows=8, temperature=1.0, dtype=torch.bfloat16)
    assert len(scored) > 100 and (scored - sampled.sampler_logp).abs().mean() < 1e-3


def test_a_prompt_that_just_fits_is_sampled_to_the_end_of_the_context(load):
    policy = load("gpt2")
    sampled = sample(policy, [Prompt("long", "a" * (CONTEXT - LENGTH), {})])
    assert len(sampled.context_ids[0]) == CONTEXT - LENGTH
    scored = score(policy.model, sampled, rows=3, temperature=1.0, dtype=torch.float32)
    assert torch.allclose(scored, sampled.sampler_logp, atol=1e-4)


@EVERY_ARCHITECTURE
@torch.no_grad()
def test_greedy_tokens_are_those_of_generate(load, prompts, architecture):
    """Until a token whose two best logits differ by less than 1e-4, where rounding may decide."""
    policy, compared = load(architecture, "fp32"), 0
    policy.model.get_output_embeddings().weight[0] /= 5  # the end comes later
    sampled = sample(policy, prompts, temperature=0.0, rows=5, tokens=24)
    for row, own in enumerate(sampled.by_row(sampled.ids)):
        prompt_ids = sampled.context_ids[row // G]
        generated = policy.model.generate(
            torch.tensor([prompt_ids]),
            attention_mask=torch.ones(1, len(prompt_ids)),
            do_sample=False,
            max_new_tokens=24,
        )[0, len(prompt_ids) :].tolist()
        ours = own.tolist()
        best = plain_logits(policy.model, prompt_ids, generated).topk(2).values
        close = (best[:, 0] - best[:, 1] < 1e-4).nonzero().flatten().tolist()
        certain = close[0] if close else len(generated)
        assert ours[:certain] == generated[:certain] and (close or ours == generated)
        compared += certain
    assert compared > 60


def arena_of(
    model, prompts: list[list[int]], width: int, new_tokens: int, kind: type = Arena, page: int | None = None
) -> Arena:
    """With all rows of these prompts, whose first tokens are there, `width` of each."""
    rows = len(prompts) * width
    longest = max(map(len, prompts))
    arena = kind(model, DecodeCapacity.of(rows, 2 * len(prompts), width, longest, new_tokens, page=page))
    arena.reset(SamplingSettings(max_new_tokens=new_tokens))
    arena.encode(dict(enumerate(prompts)))
    uniforms = torch.rand(rows, new_tokens, generator=torch.Generator().manual_seed(0))
    arena.begin({row: row // width for row in range(rows)}, uniforms)
    return arena


def advance(arena: Arena) -> None:
    arena.add_pages([slot for slot in arena.slots if arena.lacks_page(slot, 1)])
    arena.decode_step()


def place_of(arena: Arena, row: int) -> int:
    return next(place for place, slot in enumerate(arena.slots) if slot.row == row)


def assert_said_by_the_whole_text(model, prompt: list[int], arena: Arena, row: int) -> int:
    """Returns how many tokens the row has."""
    for ids, logp, length, _ in zip(*arena.sampled([place_of(arena, row)]), strict=True):
        logits = plain_logits(model, prompt, ids[:length].tolist())
        expected = logits.log_softmax(-1).gather(1, ids[:length].unsqueeze(1)).squeeze(1)
        assert torch.allclose(logp[:length], expected, atol=1e-12, rtol=0)
    return int(length)


@pytest.mark.parametrize(
    ("kind", "name"),
    [*((Arena, name) for name in FAMILY), (DynamicCacheArena, "gpt2"), (DynamicCacheArena, "gemma3_text")],
)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "plain"])
@pytest.mark.parametrize("page", [8, 64])
@torch.no_grad()
def test_a_token_is_what_the_whole_text_says(name, kind, fused, page, monkeypatch):
    """Prompts of one token to three windows, rows that leave by themselves, and others that begin in their
    slots and pages, after rows that were NaN throughout; gaps between pages and prompts are closed.

    plain: attention as devices that are no CPU have it.
    """
    if not fused:
        monkeypatch.setattr(static_cache, "_cascade_attention", static_cache._attend_once)
    model, prompts = made(shaped(name)), [[*range(1, n + 1)] for n in (36, 1, 20)]
    arena = arena_of(model, prompts, 2, 60, kind, page)
    for turn in range(59):
        if turn == 12:
            assert assert_said_by_the_whole_text(model, prompts[1], arena, 2) == 13
            arena.leave([2, 3])
            arena.forget([1])
            arena.close_gaps()
            assert [slot.row for slot in arena.slots] == [0, 1, 4, 5] and arena.free_slots == 2
            assert arena.used_bytes <= arena.cache_bytes
        if turn == 15 and arena.supports_refill:
            assert_said_by_the_whole_text(model, prompts[0], arena, 0)
            for layer in arena._layers:
                for stored in layer.pages:
                    stored[arena.slots[0].pages] = torch.nan
            arena.leave([0])
            prompts.append([5, 6, 7])
            arena.encode({3: prompts[3]})
            arena.begin({6: 3, 7: 3}, torch.rand(2, 60))
        advance(arena)
    lengths = [
        assert_said_by_the_whole_text(model, prompts[slot.group], arena, slot.row) for slot in arena.slots
    ]
    assert lengths == ([60] * 3 + [45] * 2 if arena.supports_refill else [60] * 4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2, windows", "qwen3", "gemma3_text"])
def test_tokens_do_not_depend_on_rows_or_decoder(name, tokenizer):
    """Prompts of 2 to 30 tokens, all rows at once, by parts with groups that wait for a place, one by one."""
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT}
    policy = Policy(made(AutoConfig.for_model(**shaped(name).to_dict() | sizes)), tokenizer, None)
    many = [Prompt(f"{n}", LONG_MOVE_PROMPT[:n], {}) for n in (30, 2, 17, 5, 24, 9)]
    options = {"width": 2, "ends": range(0, len(tokenizer), 7)}
    with mock.patch.object(Arena, "begin", autospec=True, side_effect=Arena.begin) as begin:
        whole, *others = [sample(policy, many, rows=rows, **options) for rows in (12, 4, 1)]
    assert begin.call_count > 5 and len(whole.lengths.unique()) > 3
    for way in DECODING[1:]:
        choose_decoding(way, policy.model.config)
        others += [sample(policy, many, rows=rows, **options) for rows in (12, 4)]
    for each in others:
        assert torch.equal(each.ids, whole.ids)
        assert torch.allclose(each.sampler_logp, whole.sampler_logp, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (AutoConfig.for_model("bloom", vocab_size=60, hidden_size=32), "is not called by name"),
        (
            AutoConfig.for_model(
                "deepseek_v3",
                **SIZES,
                n_routed_experts=2,
                num_experts_per_tok=1,
                n_group=1,
                topk_group=1,
                moe_intermediate_size=32,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=8,
                v_head_dim=8,
            ),
            "no attribute",
        ),
        (shaped("llama"), "nats wrong"),
    ],
    ids=["bloom", "deepseek", "other logits"],
)
def test_what_computes_something_else_decodes_the_usual_way_and_says_so(config, reason, logged, monkeypatch):
    model = AutoModelForCausalLM.from_config(config).eval()
    if config.model_type == "llama":
        check_decoder(model)
        assert has_static_cache(model.config) and not logged
        monkeypatch.setattr(StaticLayer, "attend", lambda self, query, *_: query)
    check_decoder(model)
    assert not has_static_cache(model.config) and isinstance(
        open_arena(model, DecodeCapacity.of(1, 1, 1, 4, 4)), DynamicCacheArena
    )
    assert len(logged) == 1 and "growing cache" in logged[0] and reason in logged[0]


@pytest.mark.parametrize("logit", [-1e5, -torch.inf])
def test_tokens_that_are_never_sampled_do_not_decide_how_a_model_decodes(logit, logged):
    """At -100,000 nats fp32 rounds by more than the check allows; tokens that cannot occur have -inf."""
    model = made(shaped("gpt2")).float()
    head, norm = model.get_output_embeddings(), model.transformer.ln_f
    head.weight = torch.nn.Parameter(head.weight.detach().clone())  # not the embedding's, too
    head.bias = torch.nn.Parameter(torch.zeros(head.out_features))
    norm.weight.data[0], norm.bias.data[0], head.weight.data[:, 0] = 0.0, 1.0, 0.0
    (head.bias.data if logit == -torch.inf else head.weight.data[:, 0])[3:30] = logit
    check_decoder(model)
    check_scorer(model, 64)
    assert has_static_cache(model.config) and not logged


@pytest.mark.parametrize("window", [512, 4096])
@pytest.mark.parametrize("name", ["mistral", "qwen2, windows", "gemma3_text", "phi3"])
def test_models_with_windows_of_a_real_size_decode_over_a_static_cache(name, window, logged):
    """The check looks beyond a window by making it smaller; one that is a token too wide would be told."""
    real = shaped(name).to_dict() | {"sliding_window": window, "max_position_embeddings": 8192}
    model = made(AutoConfig.for_model(**real)).float()
    check_decoder(model)
    assert has_static_cache(model.config) and not logged
    assert model.config.sliding_window == window
    within = Arena._mask_within
    wider = lambda self, length, size: within(self, length, size and size + 1)  # noqa: E731
    with mock.patch.object(Arena, "_mask_within", wider):
        check_decoder(model)
    assert not has_static_cache(model.config) and "nats wrong" in logged[0]


def test_what_one_model_cannot_do_refuses_no_other_of_its_kind(monkeypatch):
    bad, good = (made(shaped("llama")) for _ in range(2))
    with monkeypatch.context() as patched:
        patched.setattr(StaticLayer, "attend", lambda self, query, *_: query)
        check_decoder(bad)
    check_decoder(good)
    assert has_static_cache(good.config) and not has_static_cache(bad.config)
    copied = RolloutModel(bad, torch.bfloat16).model
    assert copied is not bad and not has_static_cache(copied.config)


@pytest.mark.parametrize(
    ("name", "more", "way", "reason"),
    [
        (
            "gpt_neo",
            {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 8},
            "rows of one length",
            "nats wrong",
        ),  # its local attention counts padding
        ("rwkv", {}, "rows one by one", "nats wrong"),  # it mixes rows in a pass over a token
        ("xlstm", {"num_blocks": 2}, "whole texts", "has wrong shape"),
        ("recurrent_gemma", {"num_attention_heads": 4, "num_hidden_layers": 3}, "whole texts", "its cache"),
    ],
    ids=lambda it: it if isinstance(it, str) and "_" in it else "",
)
def test_a_model_decodes_in_the_first_way_that_is_right(name, more, way, reason, logged):
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_heads": 4, "num_hidden_layers": 2}
    config = AutoConfig.for_model(name, **sizes | {"max_position_embeddings": 96} | more)
    model = AutoModelForCausalLM.from_config(config).eval()
    check_decoder(model)
    assert decoding_of(model.config) == way
    assert f"in {way}, which is slower" in logged[-1] and reason in logged[-1]


def test_a_model_that_is_right_in_no_way_is_refused():
    """Its layers look at what follows."""
    bert = AutoConfig.for_model(
        "bert",
        vocab_size=60,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
    )
    with pytest.raises(ValueError, match=r"BertLMHeadModel cannot be sampled from here: .* choose another"):
        check_decoder(AutoModelForCausalLM.from_config(bert).eval())


PER_TOKEN = {"gpt2": 2 * 2 * 32 * 4, "llama": 2 * 2 * 2 * 8 * 4, "qwen": 2 * 2 * 1 * 16 * 4}
"""Bytes: keys and values · layers · heads that have them · width · 4."""


@pytest.mark.parametrize("kind", [Arena, DynamicCacheArena])
@EVERY_ARCHITECTURE
@torch.no_grad()
def test_a_cache_takes_up_what_its_tokens_do(load, architecture, kind):
    """A static one is there at once, the prompt once a group; Hugging Face's grows, a prompt for each row.

    Tokens that are skipped lead to the same bytes, though not to the same log-probs.
    """
    model, size = load(architecture).model, PER_TOKEN[architecture]
    arena, skipping = (arena_of(model, [[5] * 20, [6] * 20], G, LENGTH, kind) for _ in range(2))
    for own in range(4):
        held = (4 * 20 + 2 * G * PLACES) * size  # with places for two prompts more
        if kind is DynamicCacheArena:  # one of two layers is there twice while it grows
            held = 2 * G * (20 + own) * size * 3 // 2
        assert arena.cache_bytes == held
        with LiveBytes() as live:
            arena.decode_step()
        assert kind is Arena or live.peak_bytes > held // 3
    skipping.skip(3)
    skipping.decode_step()
    assert skipping.cache_bytes == arena.cache_bytes
    assert torch.equal(skipping.sampled([0, 1]).lengths, arena.sampled([0, 1]).lengths)


def test_the_cache_is_watched_during_the_first_rows(load, prompts):
    policy, settings = load("gpt2"), SamplingSettings(max_new_tokens=LENGTH)
    uniforms = step_uniforms(len(prompts) * G, LENGTH, seed=0, step=1)
    sampling = begin_rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=2 * G)
    sampling.finish()
    growth = dict(sampling.kv_growth)
    assert [*growth] == [1, 9]
    longest = max(len(ids) for ids in sampling.batch(prompts).context_ids)
    assert growth[1] == (2 * longest + 2 * G * PLACES) * PER_TOKEN["gpt2"]


def test_every_end_that_the_model_names_ends_a_text(load, prompts):
    """Chat models have several; texts are those of one end alone, up to the first of any."""
    policy = load("gpt2", "fp64")

    def sampled(ends: int | list[int] | None) -> Batch:
        policy.model.generation_config.eos_token_id = ends
        return sample(policy, prompts, rows=8, width=4, tokens=40, step=0)

    one, alone = sampled(0), sampled(None)
    assert torch.equal(one.ids, alone.ids)  # the tokenizer's counts in any case
    many = one.padded(one.ids)[:, 1].unique()[1:5].tolist()  # none of them the tokenizer's
    several = sampled(many)
    assert (several.lengths < one.lengths).any()
    pairs = zip(one.by_row(one.ids), several.by_row(several.ids), strict=True)
    for row, (text, found) in enumerate(pairs):
        text = text.tolist()
        first = next((place for place, token in enumerate(text) if token in many), len(text) - 1)
        assert found.tolist() == text[: first + 1]
        assert several.terminated[row] == (text[first] in {0, *many})
    assert end_tokens(policy.model, policy.tokenizer) == (0, *many)
    assert end_names(policy.model, policy.tokenizer)[0] == policy.tokenizer.eos_token


@pytest.mark.parametrize(("architecture", "rows"), [("gpt2", 2), ("llama", 8), ("gpt2", 100)])
def test_a_stop_text_ends_a_completion_with_the_token_that_completes_it(load, prompts, architecture, rows):
    """Over token boundaries, whichever rows are beside it; what follows is as if it had never been."""
    assert SamplingSettings(stop=("\\n\\n", "a\tb", "###")).stop_texts == ("\n\n", "a\tb", "###")
    policy, options = load(architecture, "fp64"), {"rows": rows, "width": 4, "tokens": 40, "step": 0}
    plain = sample(policy, prompts, **options)
    longest = max(plain.texts, key=len)
    stops = longest[3:6], longest[1:3]
    stopped = sample(policy, prompts, stop=stops, **options)
    assert (stopped.lengths < plain.lengths).any()
    pairs = zip(plain.by_row(plain.ids), stopped.by_row(stopped.ids), strict=True)
    for row, (ids, found) in enumerate(pairs):
        ids, length = ids.tolist(), len(ids)
        texts = [policy.tokenizer.decode(ids[:count]) for count in range(1, length + 1)]
        first = next((n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)
        count = first or length
        assert stopped.lengths[row] == count and found.tolist() == ids[:count]
        assert bool(stopped.terminated[row]) == (first is not None or bool(plain.terminated[row]))
