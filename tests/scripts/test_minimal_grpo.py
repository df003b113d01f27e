"""The algorithm on one page is the trainer's: the same advantages, and the same gradient on one batch."""

import ast
import copy
import sys
from pathlib import Path

import pytest
import torch
from families import made, shaped
from minimal_grpo import KL_COEF, PaddedTexts, accumulate, group_advantages, sample

from grpo.config.groups import LossSettings
from grpo.learning import advantages as trainers
from grpo.learning.loss import loss_counts
from grpo.learning.objectives import accumulate_grpo
from grpo.prompt import Prompt
from grpo.scoring.logprobs import score
from grpo.types import Batch

FILE = Path(__file__).parents[2] / "scripts" / "minimal_grpo.py"
PROMPTS = [[5, 9, 2, 7, 3], [4, 8]]


def test_it_is_one_page_of_torch_and_transformers():
    """So that a person may copy it."""
    source = FILE.read_text()
    assert len(source.splitlines()) <= 150
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            root = name.partition(".")[0]
            assert root in {"torch", "transformers"} | sys.stdlib_module_names


@pytest.fixture
def batch():
    """Eight completions of two prompts, in both representations."""
    model = made(shaped("gpt2"))
    torch.manual_seed(1)
    texts = sample(model, [prompt for prompt in PROMPTS for _ in range(4)], end=0, new_tokens=9)
    sampled = texts.ids[:, -texts.mask.shape[1] :]
    lengths = texts.mask.sum(1).long()
    made_batch = Batch.of_rows(
        [Prompt("", "", {})] * 2,
        PROMPTS,
        sampled,
        lengths,
        terminated=torch.ones(8, dtype=torch.bool),
        sampler_logp=torch.zeros(sampled.shape),
        texts=[""] * 8,
    )
    return model, texts, made_batch


@pytest.mark.parametrize("rows", [8, 3, 1])
def test_its_gradient_is_the_trainers_whatever_goes_through_at_once(batch, rows):
    model, texts, made_batch = batch
    reference = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    advantages = torch.randn(8, dtype=torch.float64)
    accumulate(model, reference, texts, advantages, rows)
    found = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    common = {"rows": 8, "temperature": 1.0, "dtype": torch.float64}
    known = made_batch.with_columns(
        credit=advantages[made_batch.row], ref_logp=score(reference, made_batch, **common)
    )
    settings = LossSettings(kl_coef=KL_COEF)
    accumulate_grpo(model, known, loss_counts(known, 9), settings=settings, **common)
    for mine, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-7, atol=1e-9)


def test_its_advantages_are_the_trainers():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.25, 0.5, 0.5, 0.5, 0.5])
    expected = trainers.group_advantages(rewards, 4).float()
    torch.testing.assert_close(group_advantages(rewards, 4), expected, rtol=1e-3, atol=1e-6)


def test_texts_end_with_their_last_token_and_padding_is_not_seen(batch):
    _, texts, _ = batch
    prompts, completions = texts.ids[:, :5], texts.ids[:, 5:]
    assert prompts[4:, :3].eq(0).all() and texts.attention_mask[4:, :3].eq(0).all()
    assert completions[texts.mask == 0].eq(0).all()
    for row in range(8):
        length = int(texts.mask[row].sum())
        assert texts.attention_mask[row, 5:].sum() == length
        assert length == completions.shape[1] or completions[row, length - 1] == 0
    alone = PaddedTexts(*(tensor[4:5] for tensor in texts))
    assert torch.equal(alone.ids, texts.ids[4:5])
