"""The sampler, the scorer and a plain forward pass say the same of every token."""

import pytest
import torch
from conftest import ARCHITECTURES, CONTEXT, decode
from transformers import GPT2Config, GPT2LMHeadModel

from grpo.config.groups import LoraSettings, SamplingSettings
from grpo.memory import Shape
from grpo.memory.live import LiveBytes
from grpo.model.adapters import add_adapters, store_base
from grpo.model.load import RolloutModel, context_length, end_names, end_tokens, load_for
from grpo.rollout.decoder import CacheBytes, make_decoder
from grpo.rollout.generic import GenericDecoder
from grpo.rollout.native import NativeDecoder
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.scoring.micro_batches import micro_batch_logprobs, micro_batch_shapes, micro_batches, score
from grpo.types import Prompt, Rollout

G, LENGTH = 3, 12
PLACES = 48  # of the static cache, which has whole blocks
EVERY_ARCHITECTURE = pytest.mark.parametrize("architecture", ARCHITECTURES)


def sample(policy, prompts, *, rows=100, temperature=1.0, step=1, max_new_tokens=LENGTH) -> Rollout:
    settings = SamplingSettings(max_new_tokens=max_new_tokens, temperature=temperature)
    uniforms = step_uniforms(len(prompts) * G, max_new_tokens, seed=0, step=step)
    return rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=rows)


def plain_logits(model, prompt_ids: list[int], completion_ids: list[int]) -> torch.Tensor:
    """What a textbook does: one row, one pass over all of it, no cache, no padding."""
    logits = model(input_ids=torch.tensor([prompt_ids + completion_ids]), use_cache=False).logits[0]
    return logits[len(prompt_ids) - 1 : -1]  # the state of a token predicts the next


def plain_logprobs(model, sampled: Rollout, temperature: float) -> list[torch.Tensor]:
    rows = []
    for row, length in enumerate(sampled.lengths.tolist()):
        completion = sampled.completion_ids[row, :length].tolist()
        logits = plain_logits(model, sampled.prompt_ids[row // sampled.group_size], completion)
        logp = (logits / temperature).log_softmax(-1)
        rows.append(logp[torch.arange(length), torch.tensor(completion)])
    return rows


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def relative_difference(ours, theirs) -> float:
    """Of two gradients, in global norm."""
    difference = sum(((ours[name] - theirs[name]) ** 2).sum() for name in theirs)
    return float((difference / sum((g**2).sum() for g in theirs.values())).sqrt())


# ----------------------------------------------------------------------------- sampler and scorer


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampler_and_scorer_agree_in_fp32(load, prompts, architecture, temperature):
    policy = load(architecture, "fp32")
    sampled = sample(policy, prompts, temperature=temperature)
    assert len(set(map(len, sampled.prompt_ids))) == 4 and len(sampled.lengths.unique()) > 2
    scored = score(policy.model, sampled, rows=100, temperature=temperature, dtype=torch.float32)
    assert torch.allclose(scored, sampled.sampler_logp, atol=1e-4, rtol=0)
    assert (scored[sampled.mask] < -0.01).any()  # not vacuous
    assert (scored[~sampled.mask] == 0).all() and (sampled.sampler_logp[~sampled.mask] == 0).all()


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("rows", [1, 2, 5, 100])
def test_the_scorer_equals_a_plain_forward_pass(load, prompts, architecture, rows):
    policy = load(architecture, "fp64")
    sampled = sample(policy, prompts)
    scored = score(policy.model, sampled, rows=rows, temperature=0.7, dtype=torch.float64)
    for row, logp in enumerate(plain_logprobs(policy.model, sampled, 0.7)):
        assert torch.allclose(scored[row, : len(logp)], logp.detach(), atol=1e-12, rtol=0)


@EVERY_ARCHITECTURE
def test_the_scorers_gradient_equals_a_plain_forward_passs(load, prompts, architecture):
    """Through the keys and values of the prompt, too, that all rows of a group share."""
    policy = load(architecture, "fp64")
    sampled = sample(policy, prompts)
    weights = torch.randn(sampled.mask.shape, generator=torch.Generator().manual_seed(1)).double()
    for batch in micro_batches(sampled, 5):
        logp, _ = micro_batch_logprobs(policy.model, batch, temperature=0.7, dtype=torch.float64)
        (logp * weights[batch.rows, : logp.shape[1]]).sum().backward()
    ours = gradients(policy.model)
    policy.model.zero_grad()
    for row, logp in enumerate(plain_logprobs(policy.model, sampled, 0.7)):
        (logp * weights[row, : len(logp)]).sum().backward()
    assert relative_difference(ours, gradients(policy.model)) < 1e-12


@EVERY_ARCHITECTURE
@pytest.mark.parametrize(
    ("precision", "dtype", "nats", "gradient"),
    [("fp32", torch.float32, 1e-4, 1e-5), ("bf16", torch.bfloat16, 0.4, 0.2)],
)
def test_what_lower_precision_costs(load, prompts, architecture, precision, dtype, nats, gradient):
    """Sampler, scorer and gradient beside a plain pass in float64 on the same weights and tokens."""
    policy, exact = load(architecture, precision), load(architecture, "fp64").model
    sampler = RolloutModel(policy.model, dtype).model
    sampled = sample(policy._replace(model=sampler), prompts)
    weights = torch.randn(sampled.mask.shape, generator=torch.Generator().manual_seed(1))
    scored = score(policy.model, sampled, rows=5, temperature=1.0, dtype=dtype)
    for row, plain in enumerate(plain_logprobs(exact, sampled, 1.0)):
        for ours in (scored, sampled.sampler_logp):
            assert (ours[row, : len(plain)] - plain).abs().max() < nats
        (plain * weights[row, : len(plain)]).sum().backward()
    expected = gradients(exact)
    exact.zero_grad()
    for batch in micro_batches(sampled, 5):
        logp, _ = micro_batch_logprobs(policy.model, batch, temperature=1.0, dtype=dtype)
        (logp * weights[batch.rows, : logp.shape[1]]).sum().backward()
    ours = {name: grad.double() for name, grad in gradients(policy.model).items()}
    policy.model.zero_grad()
    assert relative_difference(ours, expected) < gradient


@pytest.mark.parametrize("in_4bit", [False, True])
def test_with_adapters_in_bf16_logits_are_as_fine_as_without(load, model_folders, prompts, in_4bit):
    """Where all logits lie near -100, as GPT-2's do, bf16 knows halves only: the sampler centres its head."""

    def difference(lora: bool) -> float:
        policy = load("gpt2", "bf16")
        if lora and in_4bit:
            policy = load_for(policy.target, str(model_folders["gpt2"]), in_4bit=True)
        with torch.no_grad():  # all states and the whole vocabulary have something in common
            policy.model.transformer.ln_f.bias[0] += 20
            policy.model.transformer.wte.weight[:, 0] -= 5
        if lora:
            add_adapters(policy.model, LoraSettings(lora_rank=4))
            store_base(policy.model, torch.bfloat16)
        sampler = RolloutModel(policy.model, torch.bfloat16).model
        sampled = sample(policy._replace(model=sampler), prompts)
        scored = score(policy.model, sampled, rows=100, temperature=1.0, dtype=torch.bfloat16)
        return (scored - sampled.sampler_logp)[sampled.mask].abs().mean().item()

    assert difference(lora=True) < 3 * difference(lora=False) + 0.01


def test_what_stands_on_the_padding_does_not_matter(load, prompts):
    """pad and end-of-text share an id, so the mask cannot come from ids: garbage there is not read."""
    policy = load("gpt2", "fp64")
    sampled = sample(policy, prompts)
    arguments = {"rows": 5, "temperature": 1.0, "dtype": torch.float64}
    before = score(policy.model, sampled, **arguments)
    sampled.completion_ids[~sampled.mask] = 17
    assert torch.allclose(score(policy.model, sampled, **arguments), before, atol=1e-13, rtol=0)


def test_the_end_of_text_token_is_scored_like_any_other(load, prompts):
    policy = load("gpt2", "fp64")
    sampled = sample(policy, prompts)
    ended = sampled.terminated.nonzero().flatten()
    last = sampled.lengths[ended] - 1
    assert len(ended) > 2 and (sampled.completion_ids[ended, last] == policy.tokenizer.eos_token_id).all()
    scored = score(policy.model, sampled, rows=100, temperature=1.0, dtype=torch.float64)
    assert (scored[ended, last] < 0).all()


def test_entropy_is_that_of_the_plain_distribution(load, prompts):
    policy = load("gpt2", "fp64")
    sampled = sample(policy, prompts)
    (batch,) = micro_batches(sampled, 100)
    _, entropy = micro_batch_logprobs(policy.model, batch, temperature=0.7, dtype=torch.float64, entropy=True)
    for place, row in enumerate(batch.rows.tolist()):
        completion = sampled.completion_ids[row, : sampled.lengths[row]].tolist()
        logits = plain_logits(policy.model, sampled.prompt_ids[row // G], completion) / 0.7
        by_torch = torch.distributions.Categorical(logits=logits).entropy()
        assert torch.allclose(entropy[place, : len(completion)], by_torch.detach(), atol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 100])
def test_micro_batches_hold_every_row_once_and_groups_whole_where_they_fit(load, prompts, rows):
    sampled = sample(load("gpt2"), prompts)
    batches = list(micro_batches(sampled, rows))
    assert sorted(torch.cat([batch.rows for batch in batches]).tolist()) == [*range(len(prompts) * G)]
    for batch in batches:
        assert len(batch.rows) <= rows
        prompts_of = [
            ids[:length].tolist()
            for ids, length in zip(batch.prompts.ids, batch.prompts.lengths, strict=True)
        ]
        scored = torch.zeros(batch.completion_ids.shape, dtype=torch.bool)
        scored.view(-1)[batch.scored] = True
        for place, row in enumerate(batch.rows.tolist()):
            assert prompts_of[batch.row_to_prompt[place]] == sampled.prompt_ids[row // G]
            length = sampled.lengths[row]
            assert torch.equal(batch.completion_ids[place, :length], sampled.completion_ids[row, :length])
            assert scored[place].tolist() == [*[True] * length, *[False] * (scored.shape[1] - length)]
        if rows >= G:
            assert len(prompts_of) * G == len(batch.rows)  # no group is cut, no prompt computed twice


# ------------------------------------------------------------------------------------------ greedy


@EVERY_ARCHITECTURE
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_greedy_tokens_are_those_of_generate(load, prompts, architecture, rows):
    """Until a token whose two best logits differ by less than 1e-4, where rounding may decide."""
    policy = load(architecture, "fp32")
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[0] /= 5  # the end comes later
    sampled = sample(policy, prompts, temperature=0.0, rows=rows, max_new_tokens=24)
    compared = 0
    for row, length in enumerate(sampled.lengths.tolist()):
        prompt_ids = sampled.prompt_ids[row // G]
        generated = policy.model.generate(
            torch.tensor([prompt_ids]), attention_mask=torch.ones(1, len(prompt_ids)), do_sample=False,
            max_new_tokens=24,
        )[0, len(prompt_ids) :].tolist()  # fmt: skip
        ours = sampled.completion_ids[row, :length].tolist()
        with torch.no_grad():
            best = plain_logits(policy.model, prompt_ids, generated).topk(2).values
        close = (best[:, 0] - best[:, 1] < 1e-4).nonzero().flatten().tolist()
        certain = close[0] if close else len(generated)
        assert ours[:certain] == generated[:certain]
        assert close or ours == generated
        compared += certain
    assert compared > 60


# ---------------------------------------------------------------------------------------- decoders


@pytest.mark.parametrize(
    "options", [{}, {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}], ids=str
)
def test_the_native_gpt2_decoder_equals_the_generic_one(options):
    """Step by step, while groups leave in between."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=64, n_embd=24, n_layer=3, n_head=3, initializer_range=0.3, **options
    )
    model = GPT2LMHeadModel(config).double().eval()
    prompt_ids = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12]]
    native, generic = NativeDecoder(model, 10), GenericDecoder(model)
    with torch.no_grad():
        logits = [decoder.prefill(prompt_ids, 2) for decoder in (native, generic)]
        for position in range(9):
            assert torch.allclose(*logits, atol=1e-12, rtol=0)
            if position in (3, 6):  # groups 0 and 2 leave, then another
                groups = [1, 3] if position == 3 else [1]
                rows = [2 * group + row for group in groups for row in (0, 1)]
                native.keep(groups), generic.keep(groups)
                logits = [values[rows] for values in logits]
            tokens = (torch.arange(len(logits[0])) * 7 + position) % 50  # rows of a group differ
            logits = [decode(decoder, tokens) for decoder in (native, generic)]
    assert torch.allclose(*logits, atol=1e-12, rtol=0)
    assert len(logits[0]) == 2


@torch.no_grad()
def test_a_group_that_takes_anothers_place_decodes_as_if_alone(load):
    """Beside one of other length, across blocks, and after a row that was NaN throughout."""
    model, long = load("gpt2", "fp64").model, 60
    decoder, alone = make_decoder(model, long), make_decoder(model, long)
    logits = decoder.prefill([[1, 2, 3], [4, 5]], G, longest_prompt=4)
    tokens = torch.arange(2 * G)
    for step in range(110):  # group 1 starts over at 30 and 80, group 0 runs into the cache's end
        if step in (30, 80):
            for layer in range(2):
                cache = decoder._layers[layer]
                cache.own_keys[G:] = cache.own_values[G:] = torch.nan
            prompt = [7, 8, 9, 10] if step == 30 else [11]
            logits[G:] = decoder.replace([1], [prompt])
            expected = alone.prefill([prompt], G)
        if step >= 30:
            assert torch.allclose(logits[G:], expected, atol=1e-12, rtol=0)
            expected = decode(alone, tokens[G:] + step)
        logits = decode(decoder, tokens + step)
    assert logits.isfinite().all()


@EVERY_ARCHITECTURE
def test_waiting_groups_take_the_place_of_finished_ones(load, prompts, architecture, monkeypatch):
    """Where the cache is static; and what is sampled is the same."""
    policy, replaced = load(architecture, "fp64"), []
    many = [Prompt(f"again:{n}", prompt.text[: 12 + n], {}) for n in range(3) for prompt in prompts]
    whole = sample(policy, many, rows=100)
    assert len(whole.lengths.unique()) > 4
    replace = NativeDecoder.replace
    monkeypatch.setattr(
        NativeDecoder, "replace", lambda *arguments: replaced.append(1) or replace(*arguments)
    )
    parts = sample(policy, many, rows=3 * G)
    assert torch.equal(parts.completion_ids, whole.completion_ids)
    assert torch.allclose(parts.sampler_logp, whole.sampler_logp, atol=1e-12, rtol=0)
    assert len(replaced) > 3


# ----------------------------------------------------------------------------------------- prompts


def test_a_prompt_that_is_empty_or_too_long_is_named(load):
    policy = load("gpt2")
    with pytest.raises(ValueError, match=r"prompt file:9 is empty"):
        sample(policy, [Prompt("file:9", "", {})])
    long = Prompt("file:3", "P: " + "8/" * 100, {})
    count = len(policy.tokenizer(long.text)["input_ids"])
    with pytest.raises(ValueError, match=rf"prompt file:3 has {count} tokens, .* leaves {CONTEXT - LENGTH} "):
        sample(policy, [long])
    assert context_length(policy.model.config) == CONTEXT


def test_a_prompt_that_just_fits_is_sampled_to_the_end_of_the_context(load):
    policy = load("gpt2")
    text = "a" * (CONTEXT - LENGTH)
    sampled = sample(policy, [Prompt("long", text, {})])
    assert len(sampled.prompt_ids[0]) == CONTEXT - LENGTH
    scored = score(policy.model, sampled, rows=3, temperature=1.0, dtype=torch.float32)
    assert torch.allclose(scored, sampled.sampler_logp, atol=1e-4)


# ------------------------------------------------------------------------------- what memory is made of


def lengths_of(*longest: int) -> Rollout:
    """Groups whose longest completions are so long; shorter ones beside them."""
    lengths = torch.tensor([length - shorter % G for length in longest for shorter in range(G)])
    ids = torch.ones(len(lengths), max(longest), dtype=torch.long)
    return Rollout(
        prompts=[Prompt(str(place), "", {}) for place in range(len(longest))],
        prompt_ids=[[1, 2] for _ in longest], completion_ids=ids, lengths=lengths,
        terminated=torch.ones_like(lengths, dtype=torch.bool), sampler_logp=torch.zeros(ids.shape),
        completions=[""] * len(lengths),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("longest", "pass_tokens", "parts"),
    [
        ([40, 40, 40, 40], 0, [[40] * 4]),  # nothing is saved
        ([40, 10, 40, 10], 60 * G - 1, [[40, 40], [10, 10]]),  # 60 tokens of a row a group
        ([40, 10, 40, 10], 60 * G, [[10, 10, 40, 40]]),
        ([40, 10, 20, 10], 0, [[40], [20], [10, 10]]),
        ([40, 10, 20, 10], 12 * G, [[40], [20], [10, 10]]),  # 60 tokens, then 20
        ([40, 10, 20, 10], 22 * G, [[20, 40], [10, 10]]),
        ([40, 10, 20, 10], None, [[10, 10, 20, 40]]),
    ],
)
def test_rows_are_parted_where_that_saves_more_padding_than_a_pass_costs(longest, pass_tokens, parts):
    made = lengths_of(*longest)
    batches = list(micro_batches(made, 100, pass_tokens=pass_tokens))
    assert [made.lengths[batch.rows].view(-1, G).amax(1).tolist() for batch in batches] == parts
    assert sorted(torch.cat([batch.rows for batch in batches]).tolist()) == [*range(len(made.lengths))]
    at_most = list(micro_batches(made, 2 * G, pass_tokens=pass_tokens))
    assert max(len(batch.rows) for batch in at_most) <= 2 * G


def test_parts_of_a_group_are_not_parted_further():
    made = lengths_of(40, 10)
    assert [len(batch.rows) for batch in micro_batches(made, G - 1, pass_tokens=0)] == [
        len(batch.rows) for batch in micro_batches(made, G - 1)
    ]


@pytest.mark.parametrize("pass_tokens", [None, 0])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 100])
def test_the_shapes_of_micro_batches_are_theirs(load, prompts, rows, pass_tokens):
    sampled = sample(load("gpt2"), prompts)
    shapes = micro_batch_shapes(sampled, rows, pass_tokens=pass_tokens)
    batches = list(micro_batches(sampled, rows, pass_tokens=pass_tokens))
    assert [shape[:3] for shape in shapes] == [
        (len(b.rows), int(b.prompts.lengths.max()), b.completion_ids.shape[1]) for b in batches
    ]
    assert [shape.scored_tokens for shape in shapes] == [len(b.scored) for b in batches]
    assert isinstance(shapes[0], Shape)


PER_TOKEN = {"gpt2": 2 * 2 * 32 * 4, "llama": 2 * 2 * 2 * 8 * 4, "qwen": 2 * 2 * 1 * 16 * 4}
"""Bytes: keys and values · layers · heads that have them · width · 4."""


@pytest.mark.parametrize("static", [True, False])
@EVERY_ARCHITECTURE
@torch.no_grad()
def test_a_cache_takes_up_what_its_tokens_do(load, architecture, static):
    """A static one is there at once, the prompt once a group; Hugging Face's grows, a prompt for each row."""
    model, size = load(architecture).model, PER_TOKEN[architecture]
    decoder = make_decoder(model, LENGTH) if static else GenericDecoder(model)
    prompt_ids, tokens = [[5] * 20, [6] * 20], torch.full((2 * G,), 7)
    decoder.prefill(prompt_ids, G)
    prompt_tokens = 2 * 20 if static else 2 * G * 20
    for own in range(4):
        used = (prompt_tokens + 2 * G * own) * size
        held = (prompt_tokens + 2 * G * PLACES) * size if static else used
        growing = 0 if static else used // 2  # one of two layers is there twice while it grows
        assert decoder.cache_bytes == CacheBytes(held, used, growing)
        with LiveBytes() as live:
            decode(decoder, tokens)
        assert static or live.peak_bytes > growing
    decoder.keep([1])
    assert decoder.cache_bytes.used == (prompt_tokens // 2 + G * 4) * size


@EVERY_ARCHITECTURE
@torch.no_grad()
def test_skipping_tokens_leads_where_decoding_them_does(load, architecture):
    """To the same bytes, shapes and positions, though not to the same logits."""
    model = load(architecture).model
    decoded, skipped = make_decoder(model, LENGTH), make_decoder(model, LENGTH)
    tokens = torch.full((2 * G,), 7)
    for decoder in (decoded, skipped):
        decoder.prefill([[5] * 20, [6] * 9], G)
    for _ in range(5):
        decode(decoded, tokens)
    skipped.skip(5)
    assert skipped.cache_bytes == decoded.cache_bytes
    assert torch.equal(skipped._positions, decoded._positions)  # both kinds of decoder have them
    assert decode(skipped, tokens).shape == decode(decoded, tokens).shape
    assert skipped.cache_bytes == decoded.cache_bytes


def test_the_cache_is_watched_during_the_first_rows_and_changes_nothing(load, prompts):
    policy, seen = load("gpt2"), []
    settings = SamplingSettings(max_new_tokens=LENGTH)
    uniforms = step_uniforms(len(prompts) * G, LENGTH, seed=0, step=1)

    def run(**options) -> Rollout:
        return rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=2 * G, **options)

    watched = run(watch_cache=lambda count, size: seen.append((count, size)))
    assert torch.equal(watched.completion_ids, run().completion_ids)
    counts = [count for count, _ in seen]
    assert counts in ([1, 9], [1, 9, LENGTH])  # and not once more for the other rows
    longest = max(len(ids) for ids in watched.prompt_ids[:2])
    full = (2 * longest + 2 * G * PLACES) * PER_TOKEN["gpt2"]
    assert seen[0][1] == CacheBytes(full, 2 * longest * PER_TOKEN["gpt2"])


# -------------------------------------------------------------------------------------------- ends


def test_every_end_that_the_model_names_ends_a_text(load, prompts, monkeypatch):
    """Chat models have several; texts are those of one end alone, up to the first of any."""
    policy = load("gpt2", "fp64")
    settings = SamplingSettings(max_new_tokens=40)
    uniforms = step_uniforms(len(prompts) * 4, 40, seed=0, step=0)

    def sampled(ends: int | list[int] | None) -> Rollout:
        monkeypatch.setattr(policy.model.generation_config, "eos_token_id", ends)
        return rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=8)

    one, alone = sampled(0), sampled(None)
    assert torch.equal(one.completion_ids, alone.completion_ids)  # the tokenizer's counts in any case
    many = one.completion_ids[:, 1].unique()[1:5].tolist()  # none of them the tokenizer's
    several = sampled(many)
    assert (several.lengths < one.lengths).any()
    for row in range(len(uniforms)):
        text = one.completion_ids[row, : one.lengths[row]].tolist()
        first = next((place for place, token in enumerate(text) if token in many), len(text) - 1)
        assert several.completion_ids[row, : several.lengths[row]].tolist() == text[: first + 1]
        assert several.terminated[row] == (text[first] in {0, *many})
    assert end_tokens(policy.model, policy.tokenizer) == (0, *many)
    assert end_names(policy.model, policy.tokenizer)[0] == policy.tokenizer.eos_token


@pytest.mark.parametrize("rows", [2, 8, 100])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_a_stop_text_ends_a_completion_with_the_token_that_completes_it(load, prompts, architecture, rows):
    """Over token boundaries, whichever rows are beside it; what follows is as if it had never been."""
    policy = load(architecture, "fp64")
    uniforms = step_uniforms(len(prompts) * 4, 40, seed=0, step=0)

    def sampled(**stop: tuple[str, ...]) -> Rollout:
        settings = SamplingSettings(max_new_tokens=40, **stop)
        return rollout(policy.model, policy.tokenizer, prompts, uniforms, settings, rows=rows)

    plain = sampled()
    longest = max(plain.completions, key=len)
    stops = longest[3:6], longest[1:3]
    stopped = sampled(stop=stops)
    assert (stopped.lengths < plain.lengths).any()
    for row in range(len(uniforms)):
        ids = plain.completion_ids[row, : plain.lengths[row]].tolist()
        texts = [policy.tokenizer.decode(ids[:count]) for count in range(1, len(ids) + 1)]
        first = next((n for n, text in enumerate(texts, 1) if any(stop in text for stop in stops)), None)
        count = first or len(ids)
        assert stopped.completion_ids[row].tolist()[:count] == ids[:count]
        assert not stopped.completion_ids[row, count:].any() and not stopped.sampler_logp[row, count:].any()
        assert stopped.lengths[row] == count
        assert bool(stopped.terminated[row]) == (first is not None or bool(plain.terminated[row]))


def test_a_line_s_end_can_be_typed():
    assert SamplingSettings(stop=("\\n\\n", "a\tb", "###")).stop_texts == ("\n\n", "a\tb", "###")
    with pytest.raises(ValueError, match="stop has an empty text"):
        SamplingSettings(stop=("x", ""))
