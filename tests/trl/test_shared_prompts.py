"""A prompt that goes through the model once: the states and gradients of one for each completion."""

import copy
from contextlib import nullcontext

import pytest
import torch
from conftest import ARCHITECTURES, let_norms_be_exact
from peft import LoraConfig
from transformers import MambaConfig, MambaForCausalLM, MistralConfig, MistralForCausalLM
from trl_cases import Case, Ours, difference, run

from grpo.trl import shared_prompts

TOKENS = 3


def mistral(vocabulary: int) -> MistralForCausalLM:
    """With a window that is shorter than the texts."""
    config = MistralConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        sliding_window=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        max_position_embeddings=64,
    )
    return MistralForCausalLM(config)


KINDS = {**ARCHITECTURES, "mistral": mistral}


def made(kind):
    torch.manual_seed(0)
    model = KINDS[kind](50).double()
    let_norms_be_exact(model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model.train()


def texts(*prompts: list[int], group: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of a group one after another, prompts padded on the left, the last completion on the right."""
    width = max(map(len, prompts))
    draws = torch.Generator().manual_seed(1)
    completions = torch.randint(1, 50, (group * len(prompts), TOKENS), generator=draws)
    padded = torch.tensor([[0] * (width - len(ids)) + ids for ids in prompts]).repeat_interleave(group, 0)
    mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
    mask = torch.cat([mask.repeat_interleave(group, 0), torch.ones_like(completions)], 1)
    mask[-1, -1] = 0
    return torch.cat([padded, completions], 1), mask


def states_and_gradients(model, ids, mask, *, shared):
    model.zero_grad()
    ends = shared_prompts.shared_prompts(model, ids, mask, TOKENS) if shared else nullcontext((ids, mask))
    with ends as (ids, mask):
        states = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
    states = states[:, -TOKENS - 1 : -1] * mask[:, -TOKENS:, None]
    states.square().sum().backward()
    return states, torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_states_and_gradients_are_the_models_own(kind, recomputes):
    """With prompts of one length and of two; transformers' gradient checkpointing is minded."""
    model = made(kind)
    for prompts in ([[1, 2, 3, 4, 5, 6], [7, 8, 9]], [[5, 6, 7], [8, 9, 8]]):
        ids, mask = texts(*prompts)
        expected = states_and_gradients(model, ids, mask, shared=False)
        other = copy.deepcopy(model)
        words, passes = [], []
        other.get_input_embeddings().register_forward_pre_hook(
            lambda _, ids, words=words: words.append(ids[0].numel())
        )
        if recomputes:
            other.gradient_checkpointing_enable()
        first_norm = next(
            m for name, m in other.named_modules() if name.endswith(("ln_1", "input_layernorm"))
        )
        first_norm.register_forward_pre_hook(lambda *_, passes=passes: passes.append(1))
        found = states_and_gradients(other, ids, mask, shared=True)
        for one, theirs in zip(found, expected, strict=True):
            assert (one - theirs).norm() <= 1e-12 * theirs.norm() and theirs.norm() > 1
        own = len(ids) * (TOKENS - 1) - 1  # of completions all but the last tokens, of which one is padding
        assert words == [sum(map(len, prompts)) + own]  # in one pass, prompts once
        assert len(passes) == (2 if recomputes else 1)


def test_what_most_rows_have_to_themselves_is_not_shared():
    ids, mask = texts([1, 2], [3, 4], [5, 6], group=1)
    assert shared_prompts.unlike_prompts(ids[:, :2], mask[:, :2]) is None
    ids = torch.tensor([[0, 1], [1, 1], [0, 1], [1, 1]])  # of which two begin with what pads the others
    unlike, rows = shared_prompts.unlike_prompts(ids, (ids > 0).long())
    assert rows.tolist() == [0, 1, 0, 1] and unlike.tolist() == [[-1, 1], [1, 1]]
    unlike, rows = shared_prompts.unlike_prompts(ids, torch.ones_like(ids))
    assert rows.tolist() == [0, 1, 0, 1] and unlike.tolist() == [[0, 1], [1, 1]]


def test_positions_that_are_each_rows_own_are_refused():
    model, texts_and_mask = made("llama"), texts([1, 2, 3], [4, 5, 6])
    with (
        shared_prompts.shared_prompts(model, *texts_and_mask, TOKENS) as (ids, mask),
        pytest.raises(ValueError, match="given position_ids: set share_prompts=False"),
    ):
        model.base_model(ids, mask, position_ids=torch.zeros_like(ids))


def test_rows_may_come_in_parts_and_with_prompts_of_their_own():
    """As TRL scores; a part of one row has nothing to share, and is cut like the others."""
    model, (ids, mask) = made("llama"), texts([1, 2, 3, 4], [4, 5])
    whole, _ = states_and_gradients(model, ids, mask, shared=False)
    states = []
    with shared_prompts.shared_prompts(model, ids, mask, TOKENS) as ends, torch.no_grad():
        for rows in (slice(0, 3), slice(3, 4), slice(4, 6)):
            states.append(model.base_model(*(end[rows] for end in ends)).last_hidden_state)
            assert states[-1].shape[1] == TOKENS + 1
    found = torch.cat(states)[:, :-1] * mask[:, -TOKENS:, None]
    assert (found - whole).norm() <= 1e-12 * whole.norm()


def test_a_trainer_learns_the_same_with_prompts_of_their_own():
    case = Case("dapo", beta=0.04, iterations=2)
    seen: dict[bool, int] = {}

    def count(shares):
        def prepare(trainer):
            def note(module, words, out):
                seen[shares] = seen.get(shares, 0) + words[0].numel()

            trainer.model.get_input_embeddings().register_forward_hook(note)

        return prepare

    runs = [run(Ours, case, prepare=count(shares), share_prompts=shares) for shares in (True, False)]
    assert max(difference(*runs)) < 1e-10
    assert seen[True] < 0.8 * seen[False]


def test_adapters_and_checkpointing_of_a_trainer(monkeypatch):
    """As TRL comes: it recomputes layers. Prompts are shared in both passes, and nothing is different."""
    more = (("gradient_checkpointing", True),)
    lora = LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False)
    calls = []
    hidden = shared_prompts.token_states

    def spy(*args, **options):
        calls.append(options["checkpointing"])
        return hidden(*args, **options)

    monkeypatch.setattr(shared_prompts, "token_states", spy)
    runs = []
    for shares in (True, False):
        torch.manual_seed(3)
        runs.append(run(Ours, Case(more=more), share_prompts=shares, peft_config=lora))
    assert max(difference(*runs)) < 1e-10 and "full" in calls


@pytest.mark.parametrize("factor, told", [(1.01, "0.01"), (torch.nan, "nan")])
def test_where_it_would_be_something_else_prompts_are_each_rows_own(monkeypatch, logged, factor, told):
    right = run(Ours, Case())

    def wrong(*args, **options):
        return factor * hidden(*args, **options)

    hidden = shared_prompts.token_states
    monkeypatch.setattr(shared_prompts, "token_states", wrong)
    assert max(difference(right, run(Ours, Case()))) < 1e-10
    assert any(f"behind a prompt of its own: hidden states come out {told} of" in line for line in logged)


def test_a_model_that_cannot_is_told_of():
    """Its layers remember a state of what came before, and no keys and values."""
    torch.manual_seed(0)
    model = MambaForCausalLM(MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2)).eval()
    assert "does not hand its attention on" in shared_prompts.check_shared_prompts(model, 64)
