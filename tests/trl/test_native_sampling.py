"""TRL's completions by our decoder: of TRL's distribution, and the same however many are sampled at once."""

import pytest
import torch
import trl
from scipy.stats import chi2_contingency, chisquare
from trl_cases import GROUP, Case, make

from grpo.memory import recovery
from grpo.trl import GRPOTrainer, sampling

pytestmark = pytest.mark.usefixtures("own_accelerator")
PROMPTS = [[1 + group] * (1 + group) for group in range(6) for _ in range(GROUP)]


@pytest.fixture
def trainer():
    return make(GRPOTrainer, Case())


def native(trainer, prompt_ids):
    """As a new step samples."""
    trainer.state.global_step += 1
    ids, logprobs = trainer._generate_single_turn(prompt_ids, None, {}, GROUP)
    assert logprobs is None
    return ids


def counts(rows: list[list[int]], position: int) -> list[int]:
    """How often each of the eight tokens stands there."""
    tokens = torch.tensor([row[position] for row in rows if len(row) > position])
    return torch.bincount(tokens, minlength=8).tolist()


def test_it_has_trls_distribution(trainer):
    """Of 2,500 rows, 10,000 tokens and more; a sampler that is a little too bold is told."""
    prompts = [[1, 2]] * 2500
    ours = native(trainer, prompts)
    torch.manual_seed(0)
    theirs, _ = trl.GRPOTrainer._generate_single_turn(trainer, prompts, None, {}, GROUP)
    trainer.temperature = 1.2
    bold = native(trainer, prompts)
    assert sum(map(len, ours)) > 10_000
    expected = trainer.model(torch.tensor([[1, 2]])).logits[0, -1].softmax(-1).detach().numpy() * len(prompts)
    for rows in (ours, theirs):
        assert chisquare(counts(rows, 0), expected).pvalue > 0.001
    assert chisquare(counts(bold, 0), expected).pvalue < 1e-6
    for position in range(trainer.max_completion_length):
        assert chi2_contingency([counts(ours, position), counts(theirs, position)]).pvalue > 0.001
    ended = [[sum(row[-1] == 0 for row in rows), len(rows)] for rows in (ours, theirs)]
    assert chi2_contingency(ended).pvalue > 0.001


def test_what_is_excluded_from_sampling_is_what_trl_excludes():
    """Top-k leaves six tokens, of which top-p leaves four, of which min-p leaves three."""
    more = ("temperature", 1.5), ("top_k", 6), ("top_p", 0.8), ("min_p", 0.33)
    trainer = make(GRPOTrainer, Case(more=more))
    prompts = [[3]] * 1000
    ours = native(trainer, prompts)
    torch.manual_seed(0)
    theirs, _ = trl.GRPOTrainer._generate_single_turn(trainer, prompts, None, {}, GROUP)
    first = torch.tensor([counts(ours, 0), counts(theirs, 0)])
    possible = first.sum(0) > 0
    assert possible.sum() == 3 and (first[:, possible] > 0).all()
    assert chi2_contingency(first[:, possible]).pvalue > 0.001


@pytest.mark.parametrize("rows", [1, 2, GROUP, 3 * GROUP, len(PROMPTS)])
def test_what_a_row_says_does_not_depend_on_how_many_are_sampled_at_once(trainer, rows):
    expected = native(trainer, PROMPTS)
    again = make(GRPOTrainer, Case())
    again.fit.fixed["sample"] = rows
    assert native(again, PROMPTS) == expected
    assert native(again, PROMPTS) != expected  # in the next step


def test_prompts_of_turns_have_groups_of_any_size(trainer):
    """A row's number decides its chances, wherever its group begins, and whether it is in one."""
    prompts = [[1, 2]] * 6 + [[3]] * 2 + [[1, 2, 4]] * 4
    assert sampling._group_size(prompts) == 2 and sampling._group_size(PROMPTS[:1]) == 1
    expected = native(trainer, prompts)
    alone = make(GRPOTrainer, Case())
    alone.fit.fixed["sample"] = 1
    assert native(alone, prompts) == expected


def test_memory_that_runs_out_changes_no_token(trainer, monkeypatch):
    expected = native(trainer, PROMPTS)
    again = make(GRPOTrainer, Case())
    sample, calls = sampling.sample_completions, []

    def runs_out(*args, rows, **options):
        calls.append(rows)
        completions = sample(*args, rows=rows, **options)
        if rows > GROUP:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return completions

    monkeypatch.setattr(sampling, "sample_completions", runs_out)
    assert native(again, PROMPTS) == expected
    assert calls == [GROUP, 2 * GROUP, 2 * GROUP, GROUP]
    assert recovery.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))


@pytest.mark.parametrize("options, reason", [
    ({"repetition_penalty": 1.1}, "generation with repetition_penalty"),
    ({"generation_kwargs": {"no_repeat_ngram_size": 2}}, "generation with no_repeat_ngram_size"),
])  # fmt: skip
def test_what_it_cannot_do_goes_trls_way_and_is_said(options, reason, logged):
    trainer = make(GRPOTrainer, Case(more=tuple(options.items())))
    assert trainer._sampler is None and logged[-1].endswith(reason)
    assert len(trainer._generate_single_turn(PROMPTS, None, {}, GROUP)[0]) == len(PROMPTS)


def test_after_a_prompt_too_long_for_the_context_trl_samples(trainer, monkeypatch, logged):
    asked = []
    monkeypatch.setattr(
        trl.GRPOTrainer, "_generate_single_turn",
        lambda self, prompt_ids, *rest: asked.append(len(prompt_ids)) or ([[1]] * len(prompt_ids), None),
    )  # fmt: skip
    for _ in range(2):
        assert native(trainer, [[1] * 12]) == [[1]]
    assert len(native(trainer, PROMPTS)) == len(PROMPTS) and asked == [1, 1]
    assert sum("after a prompt of 12 tokens: the context leaves 9" in line for line in logged) == 1


def test_versions_of_trl_that_know_one_end_only(trainer):
    """Before 1.15 there are no `eos_token_ids`, and before 1.14 rows at once are told by their place."""
    several = native(trainer, PROMPTS)
    del trainer.eos_token_ids
    trainer.generation_kwargs["eos_token_id"] = 0
    trainer.state.global_step -= 1
    trainer._sampler = sampling.NativeSampler(trainer, trainer.fit)
    assert native(trainer, PROMPTS) == several
    texts = torch.tensor([[1, 2, 3, 4]] * 4), torch.ones(4, 4, dtype=torch.long)
    found = trainer._get_per_token_logps_and_entropies(trainer.model, *texts, 2, 3)[0]
    expected = trainer._get_per_token_logps_and_entropies(trainer.model, *texts, 2, batch_size=3)[0]
    assert torch.equal(found, expected) and found.shape == (4, 2)
