"""TRL's completions by our decoder: of TRL's distribution, and the same however many are sampled at once."""

from unittest import mock

import pytest
import torch
import trl
import trl_cases
from datasets import Dataset
from families import another
from peft import (
    IA3Config,
    LoraConfig,
    PolyConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from scipy.stats import chi2_contingency, chisquare
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
from trl_cases import GROUP, Case, make, model, reward, tokenizer

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
    """Samples 2,500 rows, 10,000 tokens and more; a sampler that is a little too bold is told."""
    prompts = [[1, 2]] * 2500
    ours = native(trainer, prompts)
    torch.manual_seed(0)
    theirs, _ = trl.GRPOTrainer._generate_single_turn(trainer, prompts, None, {}, GROUP)
    trainer.generation_config.temperature = 1.2  # by which TRL's generate samples
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


@pytest.mark.parametrize("name", ["bloom", "lfm2", "mamba2", "rwkv", "nemotron_h"])
def test_kinds_that_have_no_static_cache_are_sampled_as_their_forward_pass_has_it(name, monkeypatch, logged):
    """In padded rows, rows of one length, one by one, or by whole texts: TRL pads on the left."""
    monkeypatch.setattr(trl_cases, "model", lambda: another(name, vocabulary=8, context=32))
    trainer = make(GRPOTrainer, Case())
    assert any("which is slower" in line for line in logged)
    assert not any("TRL samples" in line for line in logged)
    alone = [native(trainer, PROMPTS[start : start + GROUP]) for start in range(0, len(PROMPTS), GROUP)]
    assert all(len(ids) <= 7 for part in alone for ids in part)
    trainer.state.global_step = 0
    rows = [[3, 5, 1]] * 160
    expected = trainer.model(torch.tensor([rows[0]])).logits[0, -1].softmax(-1).detach().double().numpy()
    assert chisquare(counts(native(trainer, rows), 0), expected / expected.sum() * len(rows)).pvalue > 0.001


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
    calls = []

    class RunsOut(sampling.Rollout):
        """After the last token."""

        def __init__(self, *args, rows, **options):
            super().__init__(*args, rows=rows, **options)
            calls.append(rows)

        def finish(self):
            completions = super().finish()
            if calls[-1] > GROUP:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return completions

    monkeypatch.setattr(sampling, "Rollout", RunsOut)
    assert native(again, PROMPTS) == expected
    assert calls == [GROUP, 2 * GROUP, 2 * GROUP, GROUP]
    assert recovery.is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))


def of_config(**values):
    """Sets values in TRL's generation configuration of a trainer, as a callback would."""
    return lambda trainer: vars(trainer.generation_config).update(values)


def of_model(**values):
    """Sets values in the model's own, as a generation_config.json would."""
    return lambda trainer: vars(trainer.model.generation_config).update(values)


@pytest.mark.parametrize(
    "more, change",
    [
        ({"generation_kwargs": {"temperature": 0.4}}, None),
        ({"generation_kwargs": {"top_k": 2}}, None),
        ({"generation_kwargs": {"top_p": 0.5, "min_p": 0.05}}, None),
        ({"generation_kwargs": {"do_sample": False}}, None),
        ({"generation_kwargs": {"max_new_tokens": 3}}, None),
        ({"generation_kwargs": {"repetition_penalty": 1.0, "min_new_tokens": 0}}, None),
        ({"top_k": None}, of_model(top_k=2)),
        ({}, of_model(min_p=0.4)),
        ({}, of_config(temperature=0.4)),
        ({}, of_config(max_new_tokens=2, top_k=3)),
        (
            {},
            of_model(temperature=0.1, top_k=2, repetition_penalty=2.0, max_new_tokens=1),
        ),  # TRL's come first
    ],
)
def test_what_trls_generate_minds_is_minded_wherever_it_is_set(more, change, logged):
    """Row by row from the same distribution, and of no greater length."""
    trainer = make(GRPOTrainer, Case(more=tuple(more.items())))
    if change:
        change(trainer)
    prompts = [[3]] * 1000
    ours = native(trainer, prompts)
    torch.manual_seed(0)
    theirs, _ = trl.GRPOTrainer._generate_single_turn(trainer, prompts, None, {}, GROUP)
    assert not [line for line in logged if "TRL samples" in line]
    assert max(map(len, ours)) == max(map(len, theirs))
    for position in range(max(map(len, ours))):
        both = torch.tensor([counts(ours, position), counts(theirs, position)])
        possible = both.sum(0) > 0
        if possible.sum() > 1:
            assert chi2_contingency(both[:, possible]).pvalue > 0.001


@pytest.mark.parametrize(
    "more, change, reason",
    [
        ({"repetition_penalty": 1.1}, None, "generation with repetition_penalty"),
        ({"generation_kwargs": {"no_repeat_ngram_size": 2}}, None, "generation with no_repeat_ngram_size"),
        ({"generation_kwargs": {"suppress_tokens": [2]}}, None, "generation with suppress_tokens"),
        ({"generation_kwargs": {"forced_eos_token_id": 0}}, None, "generation with forced_eos_token_id"),
        ({"generation_kwargs": {"num_beams": 2}}, None, "generation with num_beams"),
        ({"generation_kwargs": {"eos_token_id": [0, 3]}}, None, r"ends at [0, 3], and completions at [0]"),
        ({}, of_model(bad_words_ids=[[2]]), "generation with bad_words_ids"),
        ({}, of_model(min_new_tokens=2), "generation with min_new_tokens"),
        ({}, of_config(typical_p=0.5), "generation with typical_p"),
        (
            {},
            lambda trainer: setattr(trainer.model, "generate", trainer.model.generate),
            "generate of its own",
        ),
    ],
)
def test_what_it_cannot_do_goes_trls_way_and_is_said(more, change, reason, logged):
    """Also where it is said after the trainer was made: by a callback, or the model's own configuration."""
    trainer = make(GRPOTrainer, Case(more=tuple(more.items())))
    assert (trainer._sampler is None) == (change is None)
    if change:
        change(trainer)
    for _ in range(2):
        assert len(trainer._generate_single_turn(PROMPTS, None, {}, GROUP)[0]) == len(PROMPTS)
    assert sum("TRL samples" in line and reason in line for line in logged) == 1


def peft_trainer(config, *, kind=GRPOTrainer, **more):
    with mock.patch("trl_cases.model", lambda: get_peft_model(model().float(), config)):
        return make(kind, Case(more=tuple(more.items())))


ALORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], alora_invocation_tokens=[1, 2])


@pytest.mark.parametrize(
    "config, reason",
    [
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PROMPT_TUNING"),
        (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "PREFIX_TUNING"),
        (ALORA, "aLoRA"),
    ],
)
def test_adapters_that_only_peft_can_run_are_sampled_by_trl(config, reason, logged):
    """Behind a soft prompt, or from the tokens that aLoRA looks for: the model within knows nothing of it."""
    trainer = peft_trainer(config)
    assert trainer._sampler is None and not trainer._shares
    assert sum(reason in line for line in logged) == 2  # sampling, and sharing prompts


LLAMA = {
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


@pytest.mark.parametrize("stored", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=["4 bits", "8 bits"])
def test_a_quantized_base_is_sampled_by_the_policys_own_distribution(tmp_path, stored):
    """In bf16, as TRL trains by default, where a copy of packed bits would be noise."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path)
    trainer = GRPOTrainer(
        model=str(tmp_path),
        reward_funcs=reward,
        processing_class=tokenizer(),
        train_dataset=Dataset.from_dict({"prompt": ["a b"] * 8}),
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=2),
        args=trl.GRPOConfig(
            str(tmp_path / "out"),
            use_cpu=True,
            bf16=True,
            report_to="none",
            num_generations=GROUP,
            per_device_train_batch_size=GROUP,
            max_completion_length=3,
            model_init_kwargs={"quantization_config": BitsAndBytesConfig(**stored)},
        ),
    )
    prompts = [[1, 2]] * 600
    found = native(trainer, prompts)
    assert trainer._sampler is not None
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = trainer.model(torch.tensor([[1, 2]])).logits[0, -1].double().softmax(-1)
    assert chisquare(counts(found, 0), (expected / expected.sum()).numpy() * len(prompts)).pvalue > 0.001


def test_adapters_that_are_chosen_by_task_need_peft():
    llama = LlamaForCausalLM(LlamaConfig(**LLAMA))
    poly = PolyConfig(task_type="CAUSAL_LM", r=2, n_tasks=2, n_skills=2, target_modules=["q_proj"])
    assert sampling.why_peft_must_run(get_peft_model(llama, poly)) == "peft runs POLY adapters by itself"


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"]),
        LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], use_dora=True),
        IA3Config(task_type="CAUSAL_LM", target_modules=["c_attn"], feedforward_modules=[]),
        VeraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"]),
    ],
    ids=["lora", "dora", "ia3", "vera"],
)
def test_adapters_in_layers_are_sampled_with(config):
    trainer = peft_trainer(config)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.requires_grad:
                parameter += 0.5 * torch.randn_like(parameter)
    prompts = [[1, 2]] * 800
    expected = trainer.model(torch.tensor([[1, 2]])).logits[0, -1].softmax(-1).detach().double()
    found = native(trainer, prompts)
    assert trainer._sampler is not None
    assert chisquare(counts(found, 0), (expected / expected.sum()).numpy() * len(prompts)).pvalue > 0.001


def test_adapters_that_are_switched_are_sampled_with():
    """The sampler's copy in bf16 is made anew."""
    trainer = peft_trainer(LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"]), bf16=True)
    prompts = [[1, 2]] * 500
    before = native(trainer, prompts)
    trainer.model.add_adapter("other", LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["c_attn"]))
    trainer.model.set_adapter("other")
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if ".other." in name:
                parameter += 5 * torch.randn_like(parameter)
    trainer.state.global_step -= 1
    trainer._sampler._drawn = 0, 0
    assert native(trainer, prompts) != before


def test_a_copy_that_is_another_model_is_made_once_and_never_sampled_from(monkeypatch, logged):
    made = []
    monkeypatch.setattr(sampling.RolloutModel, "check", lambda self: made.append(self) or "another model")
    with mock.patch("trl_cases.model", lambda: model().float()):
        trainer = make(GRPOTrainer, Case(more=(("bf16", True),)))
    for _ in range(3):
        assert len(native(trainer, PROMPTS)) == len(PROMPTS)
    assert len(made) == 1 and sum("TRL samples" in line and "another model" in line for line in logged) == 1


ENGINE = "use_transformers_continuous_batching"


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_an_engine_that_would_cast_what_is_trained_is_replaced_or_refused(dtype, logged):
    """TRL 1.16 casts the masters at each sampling, and never back; so small updates round to nothing."""
    more = {ENGINE: True, "bf16": dtype == "bf16", "fp16": dtype == "fp16"}
    with mock.patch("trl_cases.model", lambda: model().float()):
        if dtype == "fp16":
            with pytest.raises(ValueError, match=rf"{ENGINE} would cast .* to fp16 .*set {ENGINE}=False"):
                make(GRPOTrainer, Case(more=tuple(more.items())))
            return
        trainer = make(GRPOTrainer, Case(more=tuple(more.items())))
        assert any("sampled by the native decoder" in line and "to bf16, for good" in line for line in logged)
        native(trainer, PROMPTS)
        assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}
        with pytest.raises(ValueError, match=r"cannot sample instead .native_sampling is False"):
            make(GRPOTrainer, Case(more=tuple(more.items())), native_sampling=False)
        with pytest.raises(ValueError, match=r"cannot sample instead .generation with no_repeat_ngram_size"):
            kwargs = {"generation_kwargs": {"no_repeat_ngram_size": 2}}
            make(GRPOTrainer, Case(more=tuple({**more, **kwargs}.items())))


def test_an_engine_that_casts_nothing_stays():
    trainer = make(GRPOTrainer, Case(more=((ENGINE, True),)))
    assert trainer._has_engine and trainer._sampler is None and not trainer.engine_casts


def test_after_a_prompt_too_long_for_the_context_trl_samples(trainer, monkeypatch, logged):
    asked = []
    monkeypatch.setattr(
        trl.GRPOTrainer,
        "_generate_single_turn",
        lambda self, prompt_ids, *rest: asked.append(len(prompt_ids)) or ([[1]] * len(prompt_ids), None),
    )
    for _ in range(2):
        assert native(trainer, [[1] * 12]) == [[1]]
    assert len(native(trainer, PROMPTS)) == len(PROMPTS) and asked == [1, 1]
    assert (
        sum("after a prompt of 12 tokens the context leaves no room, 9 fit" in line for line in logged) == 1
    )


def test_versions_of_trl_that_know_one_end_only(trainer):
    """Before 1.15 there are no `eos_token_ids`, and before 1.14 rows at once are told by their place."""
    several = native(trainer, PROMPTS)
    del trainer.eos_token_ids
    trainer.eos_token_id = trainer.generation_config.eos_token_id = 0
    trainer.state.global_step -= 1
    trainer._sampler = sampling.NativeSampler(trainer, trainer.fit)
    assert native(trainer, PROMPTS) == several
    texts = torch.tensor([[1, 2, 3, 4]] * 4), torch.ones(4, 4, dtype=torch.long)
    found = trainer._get_per_token_logps_and_entropies(trainer.model, *texts, 2, 3)[0]
    expected = trainer._get_per_token_logps_and_entropies(trainer.model, *texts, 2, batch_size=3)[0]
    assert torch.equal(found, expected) and found.shape == (4, 2)
