"""What TRL's users do runs through unchanged, and says what memory it takes."""

import json
import re

import pytest
import torch
import trl
from benchmarks.trl_cases import GROUP, Case, make, rows_at_once
from benchmarks.trl_own_tests import tokenizer
from datasets import Dataset
from transformers import Qwen3Config, Qwen3ForCausalLM

from grpo.trl import GRPOTrainer

pytestmark = pytest.mark.usefixtures("own_accelerator")


@pytest.fixture(scope="module")
def chat_tokenizer():
    """Bytes, and Qwen 3's chat template."""
    return tokenizer("qwen3")


def chat_model(tokenizer):
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=8, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip


def settings(tmp_path, **options):
    return trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_steps=1, max_steps=3, per_device_train_batch_size=8, num_generations=4,
        max_completion_length=16, learning_rate=1e-3, gradient_checkpointing=False, **options,
    )  # fmt: skip


MESSAGES = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"What is {i}?"}] for i in range(8)]})


def test_a_conversation_with_adapters_and_a_metric_of_the_reward(chat_tokenizer, tmp_path, capsys):
    from peft import LoraConfig

    def brevity(completions, log_metric, trainer_state, **_):
        log_metric("letters", sum(len(each[0]["content"]) for each in completions))
        return [-float(len(each[0]["content"])) for each in completions]

    trainer = GRPOTrainer(
        model=chat_model(chat_tokenizer), processing_class=chat_tokenizer, reward_funcs=brevity,
        train_dataset=MESSAGES, args=settings(tmp_path, beta=0.04), peft_config=LoraConfig(r=2),
    )  # fmt: skip
    before = {name: value.clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, value in trainer.model.named_parameters() if not torch.equal(value, before[name])}
    assert moved and all("lora_" in name for name in moved)
    first, _, last = trainer.state.log_history[:3]
    assert first["letters"] > 0 and first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert [first[f"memory/{phase}_rows"] for phase in ("sample", "score", "learn")] == [4, 4, 4]
    assert last["memory/learn_rows"] == 8 and last["memory/learn_peak_gb"] > 0.1
    assert last["memory/learn_retries"] == 0
    table = capsys.readouterr().out
    assert "Memory planned after the first step" in table and "Memory, most of all steps" in table
    assert re.search(r"learn\W+8\W+\d\.\d\d\W+\d\.\d\d", table)


def calls(tokenizer, name: str, **arguments) -> list[int]:
    text = f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"
    return tokenizer(text)["input_ids"]


def answers_with_tools(monkeypatch, tokenizer, name: str, **arguments) -> list[int]:
    """Let the first turn of every other row call a tool; the rest is sampled. Gives the rows of each call."""
    asked = []
    generate = trl.GRPOTrainer._generate_single_turn

    def first_turn_calls(self, prompt_ids, *rest, **named):
        asked.append(len(prompt_ids))
        ids, logprobs = generate(self, prompt_ids, *rest, **named)
        if "<tool_response>" not in tokenizer.decode(prompt_ids[0]):
            ids[::2] = [calls(tokenizer, name, **arguments) for _ in ids[::2]]
        return ids, logprobs

    monkeypatch.setattr(trl.GRPOTrainer, "_generate_single_turn", first_turn_calls)
    return asked


def test_a_tool(chat_tokenizer, tmp_path, monkeypatch):
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: One.
            b: The other.

        Returns:
            Their product.
        """
        seen.append((a, b))
        return a * b

    seen: list[tuple[int, int]] = []
    asked = answers_with_tools(monkeypatch, chat_tokenizer, "multiply", a=3, b=4)
    trainer = GRPOTrainer(
        model=chat_model(chat_tokenizer), processing_class=chat_tokenizer, tools=[multiply],
        reward_funcs=lambda completions, **_: [float(len(each)) for each in completions],
        train_dataset=MESSAGES, args=settings(tmp_path, chat_template_kwargs={"enable_thinking": False}) ,
    )  # fmt: skip
    trainer.max_completion_length = 160
    trainer.train()
    assert seen == [(3, 4)] * 12 and trainer.state.log_history[0]["tools/call_frequency"] == 0.5
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0
    assert asked[:3] == [4, 4, 4]  # two groups, and the four rows that go on after a tool's answer


def test_an_environment(chat_tokenizer, tmp_path, monkeypatch):
    class Counter:
        def reset(self, **kwargs) -> str | None:
            self.count = 0
            return " Count."

        def add(self, by: int) -> int:
            """Add to the count.

            Args:
                by: How much.

            Returns:
                The count.
            """
            self.count += by
            return self.count

        def get_reward(self) -> float:
            return float(self.count)

    answers_with_tools(monkeypatch, chat_tokenizer, "add", by=2)
    trainer = GRPOTrainer(
        model=chat_model(chat_tokenizer), processing_class=chat_tokenizer, environment_factory=Counter,
        train_dataset=MESSAGES, args=settings(tmp_path),
    )  # fmt: skip
    trainer.max_completion_length = 160
    trainer.train()
    assert all(entry["reward"] == 1.0 for entry in trainer.state.log_history[:3])


def test_memory_that_runs_out_is_told_and_the_run_goes_on(tmp_path, logged):
    trainer = make(GRPOTrainer, Case())
    fits = {"at most": GROUP}

    def forward(module, given, named):
        if module.training and len(named["input_ids"]) > fits["at most"]:
            raise torch.OutOfMemoryError("CUDA out of memory")

    trainer.model.register_forward_pre_hook(forward, with_kwargs=True)
    trainer.train()
    learn = [entry["memory/learn_rows"] for entry in trainer.state.log_history[:-1]]
    assert learn == [GROUP] * 4
    assert trainer.state.log_history[1]["memory/learn_retries"] == 2
    assert any("learn: out of memory with 8 rows" in line for line in logged)
    fits["at most"] = 100
    rows_at_once(2 * GROUP)(trainer)
    trainer.training_step(trainer.model, next(iter(trainer.get_train_dataloader())), None)
    trainer.memory.note(trainer.fit.take_passes())
    assert any("plan: learn 4 -> 8 rows at once: room for more; " in line for line in logged)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2.*set it to 1.0"),
        ({"loss_type": "new_loss"}, "'new_loss'.*set loss_type to one of grpo"),
    ],
)
def test_what_a_batch_in_parts_cannot_have_is_refused_before_anything_is_loaded(tmp_path, more, says):
    with pytest.raises(ValueError, match=says):
        GRPOTrainer(model="nowhere/nothing", reward_funcs=len, args=settings(tmp_path, **more))


def test_more_refusals(tmp_path, chat_tokenizer):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    with pytest.raises(ValueError, match=r"memory_utilization=1.5: a share"):
        GRPOTrainer(model="nowhere/nothing", reward_funcs=len, memory_utilization=1.5)
    with pytest.raises(ValueError, match="write it like 24GB"):
        GRPOTrainer(model="nowhere/nothing", reward_funcs=len, memory_limit="lots")
    config = Qwen3MoeConfig(
        vocab_size=len(chat_tokenizer), hidden_size=16, intermediate_size=32, moe_intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=2,
        num_experts_per_tok=1, output_router_logits=True,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0.0"):
        GRPOTrainer(
            model=Qwen3MoeForCausalLM(config), processing_class=chat_tokenizer, train_dataset=MESSAGES,
            reward_funcs=lambda completions, **_: [0.0] * len(completions), args=settings(tmp_path),
        )  # fmt: skip
