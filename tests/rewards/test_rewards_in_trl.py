"""TRL's own trainer takes the rewards as they are."""

import math

import pytest

from rewards import REWARDS

MOVES = ["a4a5", "d4c4", "a6g6", "a6a8", "d4c5"]
START = "rnbqkbnr/pppppppp/8/8/8/8/PPPPPPPP/RNBQKBNR w KQkq - 0 1"
ROWS = [
    {
        "prompt": "P: 8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56",
        "fen": "8/8/R7/7p/P2K2k1/7r/8/8 w - - 0 56",
        "moves": MOVES,
        "evals": [0.3, -4.0, 0.1, 0.0, 0.2],
        "action": None,
        "history": None,
    },
    {
        "prompt": f"A: {START}+e2e4+e2e4+",
        "fen": START,
        "moves": None,
        "evals": None,
        "action": "e2e4",
        "history": ["e2e4"],
    },
]


def tiny_policy():
    """A random GPT-2 (1 layer, width 16) and its tokenizer of single characters."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    vocabulary = {"<eos>": 0, "<unk>": 1} | {chr(code): code - 30 for code in range(32, 127)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<eos>", unk_token="<unk>"
    )
    config = GPT2Config(
        vocab_size=len(vocabulary),
        n_positions=128,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config), tokenizer


def test_grpo_trainer_runs_with_the_rewards(tmp_path):
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer = tiny_policy()
    seen: list[tuple[list, list, list]] = []

    def spy(prompts, completions, **columns):
        """What our rewards say of the same call, and that it is a string for a string."""
        assert all(isinstance(text, str) for text in [*prompts, *completions])
        own = [REWARDS[name](prompts, completions, **columns) for name in ("policy", "environment")]
        seen.append((prompts, *own))
        return [0.0] * len(prompts)

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=[REWARDS["policy"], REWARDS["environment"], spy],
        train_dataset=Dataset.from_list(ROWS),
        args=GRPOConfig(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            num_generations=2,
            max_completion_length=12,
            max_steps=2,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
    )
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "rewards/policy/mean" in entry]
    assert len(steps) == len(seen) == 2
    for entry, (prompts, policy, environment) in zip(steps, seen, strict=True):
        assert [reward is not None for reward in policy] == [prompt.startswith("P:") for prompt in prompts]
        assert [reward is None for reward in policy] == [reward is not None for reward in environment]
        for name, rewards in (("policy", policy), ("environment", environment)):
            scored = [reward for reward in rewards if reward is not None]
            mean = entry[f"rewards/{name}/mean"]
            assert mean == pytest.approx(sum(scored) / len(scored)) if scored else math.isnan(mean)
