"""Kernels of our own: values and gradients are torch's, no farther from the truth, and less is kept."""

import copy
import dataclasses
from collections.abc import Callable

import pytest
import torch
from test_checkpointing import COMPLETIONS_OF_PROMPTS, made, made_up
from torch import nn
from transformers.masking_utils import sdpa_mask
from whole_runs import train

from grpo.config.groups import LoraSettings
from grpo.distributed.shard import decoder_layers
from grpo.memory.live import LiveBytes
from grpo.model import lower_right
from grpo.model.adapters import add_adapters
from grpo.model.cpu import attention, feed_forward
from grpo.model.cpu.embedding_gradients import gradients_in_place
from grpo.model.cpu.feed_forward import slice_feed_forward
from grpo.model.cpu.sums import bags, weighted_sums
from grpo.model.target import choose_attention
from grpo.scoring.micro_batches import micro_batch_logprobs
from grpo.scoring.model_checks import check_scorer

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def no_farther(ours, theirs, truth, slack: float = 0) -> bool:
    """From the truth, each in norm."""
    return all(
        (one.double() - true).norm() <= 1.2 * (other.double() - true).norm() + slack * true.norm()
        for one, other, true in zip(ours, theirs, truth, strict=True)
    )


def learned(model, batch, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    """Log-probs, and the gradients of some sum of them by all parameters."""
    logp, _ = micro_batch_logprobs(model, batch, temperature=1.0, dtype=dtype)
    (logp * torch.arange(1, 1 + logp.numel()).view_as(logp)).sum().backward()
    return [logp.detach(), *(parameter.grad for parameter in model.parameters())]


R, H, Q, K, D, T = 5, 6, 7, 11, 8, 13


def plain(query, key, value, mask, scale=D**-0.5):
    return (query @ key.mT * scale + mask).softmax(-1) @ value


def example(dtype, heads=H):
    torch.manual_seed(0)
    query = torch.randn(R, Q, H, D).transpose(1, 2).to(dtype).requires_grad_()
    key, value = (torch.randn(R, heads, K, D).to(dtype).requires_grad_() for _ in range(2))
    beyond = torch.ones(Q, K).triu(K - Q + 1).bool()
    mask = torch.zeros(R, 1, Q, K).masked_fill(beyond, torch.finfo(F32).min)
    mask[1, 0, :, :3] = torch.finfo(F32).min  # a row with a shorter prompt
    return query, key, value, mask.to(torch.promote_types(dtype, F32))


@pytest.fixture(params=[True, False], ids=["tiles", "no tiles"])
def tiles(request, monkeypatch):
    """As on a processor with them, whose forward pass is fused, and as on one without."""
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: request.param)


@pytest.mark.usefixtures("made_up_plans", "tiles")
def test_a_step_is_trained_on_either_kind_of_processor(config):
    """The first command: checks of the model, whose products are exact, an evaluation, a step."""
    config, trainers = dataclasses.replace(config, precision="bf16", steps=1, eval_interval=1), []
    folder = train(config, trainers.append)
    assert trainers[0].run.policy.target.dtype == BF16 and (folder / "checkpoints/step-000001").exists()


@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize(("parts", "heads"), [(1, H), (2, 2), (8, H)])
def test_values_and_gradients_are_those_of_plain_attention(parts, heads, monkeypatch):
    monkeypatch.setattr(attention, "_PARTS", parts)
    *inputs, mask = example(F64, heads)
    mixed, weights = attention.attend(None, *inputs, mask, scaling=0.3, dropout=0.0)
    shared = (each.repeat_interleave(H // heads, 1) for each in inputs[1:])
    expected = plain(inputs[0], *shared, mask, 0.3).transpose(1, 2)
    assert weights is None
    grad = torch.randn_like(mixed)
    ours, theirs = ((each, *torch.autograd.grad(each, inputs, grad)) for each in (mixed, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    if heads == H:  # without a mask all is attended to
        mixed, _ = attention.attend(None, *inputs, None)
        torch.testing.assert_close(mixed.transpose(1, 2), plain(*inputs, 0.0))


@pytest.mark.usefixtures("tiles")
def test_in_bf16_it_is_no_farther_from_the_truth_than_plain_attention():
    *lower, mask = example(BF16)
    exact = [each.detach().double().requires_grad_() for each in lower]
    grad = torch.randn(R, H, Q, D).bfloat16()

    def with_gradients(mixed, inputs):
        return mixed, *torch.autograd.grad(mixed, inputs, grad.to(mixed.dtype))

    ours = with_gradients(attention.attend(None, *lower, mask)[0].transpose(1, 2), lower)
    eager = with_gradients(plain(*lower, mask.bfloat16()), lower)
    assert no_farther(ours, eager, with_gradients(plain(*exact, mask.double()), exact))


@pytest.mark.usefixtures("tiles")
def test_autocast_decides_the_dtype_and_does_not_reach_the_backward_pass():
    inputs = example(F32)
    with torch.autocast("cpu", BF16):
        mixed, _ = attention.attend(None, *inputs)
        assert mixed.dtype == BF16
        grads = torch.autograd.grad(mixed, inputs[:3], torch.ones_like(mixed), retain_graph=True)
    outside = torch.autograd.grad(mixed, inputs[:3], torch.ones_like(mixed))
    assert all(map(torch.equal, grads, outside)) and all(grad.dtype == F32 for grad in grads)


def embedding_model(tied: bool = True, padding: int | None = None):
    kind = "gpt2" if padding is None and tied else "llama"
    options = {"vocab_size": 2000, "hidden_size": 16, "pad_token_id": padding}
    return made(kind, tie_word_embeddings=tied, **options).double()


@pytest.mark.parametrize(("tied", "padding"), [(True, None), (False, 7), (True, 7)])
def test_gradients_of_embeddings_are_autograds(monkeypatch, tied, padding):
    found = []
    for _ in range(2):
        policy = embedding_model(tied, padding)
        for seed in range(2):
            _, *gradients = learned(policy, made_up(COMPLETIONS_OF_PROMPTS, 9, seed))
        found.append(gradients)
        assert not any("forward" in vars(module) for module in policy.modules())
        monkeypatch.setattr("grpo.model.cpu.embedding_gradients.is_sharded", lambda model: True)  # autograd's
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)
    assert policy.get_input_embeddings().weight.grad.norm() > 0.1


def test_no_second_tensor_of_the_vocabulary_is_made(monkeypatch):
    """But the head's gradient; autograd makes one for prompts, one for completions, and sums."""
    peaks = []
    for _ in range(2):
        policy = embedding_model()
        logp, _ = micro_batch_logprobs(policy, made_up([(7, 1)], 1), temperature=1.0, dtype=F64)
        with LiveBytes() as live:
            logp.sum().backward()
        peaks.append(live.peak_bytes / policy.transformer.wte.weight.nbytes)
        monkeypatch.setattr("grpo.model.cpu.embedding_gradients.is_sharded", lambda model: True)
    assert peaks[0] < 1.6 < 2 < peaks[1]


def test_frozen_embeddings_get_nothing_and_those_of_another_kind_are_left_to_autograd():
    """A short vocabulary, one with a forward of its own, and another class."""
    policy = embedding_model(tied=False)
    policy.model.embed_tokens.weight.requires_grad_(False)
    learned(policy, made_up(COMPLETIONS_OF_PROMPTS, 9))
    assert policy.model.embed_tokens.weight.grad is None and policy.lm_head.weight.grad is not None
    policy = embedding_model()
    embedding, ids = policy.transformer.wte, torch.zeros(1, 2000, dtype=torch.long)  # as many as words
    with gradients_in_place(policy):
        assert "_LookUp" not in str(embedding(ids).grad_fn)
        assert "_LookUp" in str(embedding(ids[:, 1:]).grad_fn)
    own = embedding.forward = copy.copy(embedding.forward)
    with pytest.raises(KeyError), gradients_in_place(policy):
        raise KeyError
    assert embedding.forward is own
    del embedding.forward
    embedding.__class__ = type("Scaled", (nn.Embedding,), {"forward": lambda self, ids: 2 * self.weight[ids]})
    with gradients_in_place(policy):
        assert "forward" not in vars(embedding)


FEEDING = {
    "gpt2": {"activation_function": "gelu_pytorch_tanh"},
    "qwen2": {"intermediate_size": 4 * D, "num_key_value_heads": 1},
}
EVERY_KIND = pytest.mark.parametrize("kind", FEEDING)


def both(dtype: torch.dtype = F32, kind: str = "gpt2", *, adapted: bool = False) -> list[nn.Module]:
    """A layer as Hugging Face computes it, with weights that reach the activation's bends, and ours."""
    models = [made(kind, hidden_size=D, **FEEDING[kind]) for _ in range(2)]
    slice_feed_forward(models[1])
    for model in models:
        if adapted:  # which then stand in the last product's place
            add_adapters(model, LoraSettings(2, lora_targets=("all-linear",)))
    theirs, ours = (next(decoder_layers(model.base_model)).mlp for model in models)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(generator=generator)
    ours.load_state_dict(theirs.state_dict())
    assert type(ours) is not type(theirs)
    return [theirs.to(dtype), ours.to(dtype)]


def fed(layer: nn.Module, dtype: torch.dtype = F32, scale: float = 2, lower: bool = False):
    """What it makes of some tokens, and gradients of a weighted sum by them and by what is trained."""
    generator = torch.Generator().manual_seed(2)
    x = (scale * torch.randn(3, T, D, generator=generator)).to(dtype).requires_grad_()
    weights = torch.randn(3, T, D, generator=generator).to(dtype)
    with torch.autocast("cpu", BF16, enabled=lower):
        result = layer(x)
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad((result * weights).sum(), [x, *trained])
    return [result.detach(), *grads]


@EVERY_KIND
@pytest.mark.parametrize(("part", "size", "adapted"), [(1, 1, False), (5, 7, True), (1024, 2**17, False)])
def test_what_is_fed_forward_is_theirs_in_float64(monkeypatch, part, size, adapted, kind):
    monkeypatch.setattr(feed_forward, "_PART", part)
    monkeypatch.setattr(feed_forward, "_SLICE", size)
    theirs, ours = (fed(layer, F64) for layer in both(F64, kind, adapted=adapted))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@EVERY_KIND
@pytest.mark.parametrize(("scale", "lower"), [(2, False), (2, True), (1e4, True)])
def test_in_training_precisions_it_is_no_farther_from_the_truth(scale, lower, kind):
    """Far from zero, too."""
    theirs, ours = (fed(layer, F32, scale, lower) for layer in both(kind=kind))
    assert [each.dtype for each in ours] == [each.dtype for each in theirs]
    assert no_farther(ours, theirs, fed(both(F64, kind)[0], F64, scale), slack=1e-6)


@pytest.mark.parametrize(("kind", "kept", "kept_by_theirs"), [("gpt2", 1, 2), ("qwen2", 2, 4)])
def test_what_an_activation_makes_is_not_kept(kind, kept, kept_by_theirs):
    """Kept are the layer's input, for each of its first products, and what they made of it."""
    found = []
    for layer in both(kind=kind):
        x = torch.randn(3, T, D, requires_grad=True)
        with LiveBytes() as live:
            made_of_it = layer(x)
            found.append((live.live_bytes - made_of_it.nbytes) / (4 * x.nbytes))
    assert found == [kept_by_theirs, kept]


def test_one_token_of_each_row_gives_the_same_and_only_what_is_trained_gets_a_gradient():
    for kind in ("qwen2", "gpt2"):
        theirs, ours = both(kind=kind)
        x = torch.randn(T, 1, D)
        assert torch.equal(theirs(x), ours(x))
    ours.c_proj.requires_grad_(False)
    ours(torch.randn(3, T, D)).sum().backward()
    assert ours.c_proj.weight.grad is ours.c_proj.bias.grad is None and ours.c_fc.weight.grad.norm() > 0


def test_copies_are_computed_so_too_and_hold_weights_of_their_own():
    """And another activation function stays as it is."""
    for activation in ("relu", "gelu_pytorch_tanh"):
        model = made("gpt2", hidden_size=D, activation_function=activation)
        names, classes = set(model.state_dict()), [type(module) for module in model.modules()]
        slice_feed_forward(model)
        assert ([type(module) for module in model.modules()] == classes) == (activation == "relu")
    other = copy.deepcopy(model)
    layer, copied = model.transformer.h[1].mlp, other.transformer.h[1].mlp
    x = torch.randn(2, 3, D)
    before = copied(x)
    nn.init.zeros_(layer.c_proj.weight)
    assert torch.equal(copied(x), before) and before.any() and type(copied) is type(layer)
    assert set(other.state_dict()) == names


EQUAL, UNEQUAL = [(7, 3), (7, 1), (7, 2)], [(7, 3), (6, 1), (7, 2)]


def by(model, batch, kind: str, dtype: torch.dtype = F64) -> list[torch.Tensor]:
    """`learned` with this attention."""
    model.set_attn_implementation(kind)
    model.zero_grad()
    return [each.clone() for each in learned(model, batch, dtype)]


@pytest.fixture
def registered(monkeypatch) -> Callable[[str, Callable], None]:
    """What puts a function in another's place, known to transformers too, until the test is over."""

    def put(name: str, function: Callable) -> None:
        monkeypatch.setattr(lower_right, name, function)
        lower_right.register()

    yield put
    monkeypatch.undo()
    lower_right.register()


@pytest.fixture
def masks(registered) -> list[torch.Tensor | None]:
    """Those that attention is given, one after the other."""
    seen, attend = [], lower_right.attend

    def note(module, query, key, value, attention_mask, **options):
        if query.shape[2] < key.shape[2]:
            seen.append(attention_mask)
        return attend(module, query, key, value, attention_mask, **options)

    registered("attend", note)
    return seen


@pytest.mark.parametrize(
    ("architecture", "groups"), [("gpt2", EQUAL), ("llama", EQUAL), ("qwen", EQUAL), ("llama", UNEQUAL)]
)
def test_without_a_mask_log_probs_and_gradients_are_the_same(load, masks, architecture, groups):
    model, batch = load(architecture, "fp64").model, made_up(groups, 9)
    expected = by(model, batch, "sdpa")
    assert masks == []
    torch.testing.assert_close(by(model, batch, lower_right.NAME), expected, rtol=1e-12, atol=1e-12)
    model = load(architecture).model  # whose products are in bf16, where all others are
    expected, found = (by(model, batch, name, BF16)[0] for name in ("sdpa", lower_right.NAME))
    assert (found - expected).abs().max() < 0.05
    assert len(masks) == 4 and all((mask is None) == (groups == EQUAL) for mask in masks)
    check_scorer(model, 24)
    assert {mask is None for mask in masks[4:]} == {True, False}  # both are tried


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWS = {"mistral": {}, "gemma3_text": {"head_dim": 8, "layer_types": KINDS}}


def with_window(kind: str, length: int = 5, **changes):
    options = {"num_key_value_heads": 2, "sliding_window": length, **changes}
    return made(kind, **WINDOWS[kind], **options).double()


@pytest.mark.parametrize("kind", WINDOWS)
def test_layers_with_a_window_see_no_more_than_it(masks, kind):
    """Prompts of one length, as a single group's always are, and completions that cross the window."""
    model, batch = with_window(kind), made_up(EQUAL, 9)
    expected, found = (by(model, batch, attention) for attention in ("sdpa", lower_right.NAME))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-9)  # norms are in fp32
    model.config.sliding_window = None if kind == "mistral" else 1000
    beyond, *_ = by(model, batch, "sdpa")
    assert (beyond - expected[0]).abs().max() > 0.01
    assert [mask is None for mask in masks] == [False, kind == "gemma3_text", False]  # its second sees all
    model = with_window(kind, 8)
    model.set_attn_implementation("sdpa")
    check_scorer(model, 64)  # with a mask too


def test_the_check_of_the_scorer_crosses_the_window_however_long_it_is(registered):
    """And is not misled by a pass of the model's own that makes no mask either."""
    model = with_window("mistral", 1000, max_position_embeddings=2000)
    lower_right.register()
    model.set_attn_implementation(lower_right.NAME)
    check_scorer(model, 2000)
    assert model.config.sliding_window == 1000

    def blind(*args, attention_mask=None, **options):
        return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **options)

    registered("_mask", blind)
    with pytest.raises(ValueError, match="log-probs come out"):
        check_scorer(model, 2000)


def test_it_is_what_cuda_takes(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda on: None)
    assert choose_attention(torch.device("cuda"), BF16) == lower_right.NAME
    assert choose_attention(torch.device("cpu"), F32) == "sdpa"


B, G, M, W = 3, 2, 5, 6


def tables_and_weights(dtype, *, g=G, n=M):
    torch.manual_seed(0)
    weights, tables = torch.randn(B * g, H, n, dtype=dtype), torch.randn(B, H, M, W, dtype=dtype)
    return weights, tables, torch.einsum("rhn,rhnw->rhw", weights, tables.repeat_interleave(g, 0)[:, :, :n])


@pytest.mark.parametrize(("n", "g"), [(1, G), (3, 1), (M, G)])
@pytest.mark.parametrize("looked_up", [True, False])
def test_they_are_sums_over_the_first_rows_of_each_rows_table(g, n, looked_up):
    weights, tables, by_hand = tables_and_weights(F64, g=g, n=n)
    chosen = bags(tables, n, g=g) if looked_up else None
    sums = weighted_sums(weights, tables, chosen)
    torch.testing.assert_close(sums, by_hand, rtol=0, atol=1e-14)
    assert torch.equal(weighted_sums(weights, tables, chosen, width=2), sums[..., :2])


@pytest.mark.parametrize(("dtype", "limit"), [(F32, 1e-6), (BF16, 2**-7)])
def test_lower_precision_adds_up_exactly_rounds_once_and_is_counted(dtype, limit):
    weights, tables, _ = tables_and_weights(dtype)
    chosen = bags(tables, M, g=G)
    with LiveBytes() as live, torch.no_grad():
        sums = weighted_sums(weights, tables, chosen)
    exact = weighted_sums(weights.double(), tables.double(), None)
    assert sums.dtype == dtype and (sums - exact).abs().max() < limit * exact.abs().max()
    converted = 4 * weights.numel() if dtype == BF16 else 0
    counts = 2 * chosen.starts.nbytes  # of each bag's rows, twice
    assert live.peak_bytes == sums.nbytes + counts + converted


def test_a_row_comes_out_the_same_whoever_is_beside_it():
    weights, tables, _ = tables_and_weights(F32)
    together = weighted_sums(weights, tables, bags(tables, M, g=G))
    for b in range(B):
        alone = weighted_sums(weights[b * G : (b + 1) * G], tables[b : b + 1], bags(tables[:1], M, g=G))
        assert torch.equal(alone, together[b * G : (b + 1) * G])
    assert bags(torch.empty(B, H, M, W, device="meta"), M) is None  # other devices multiply
