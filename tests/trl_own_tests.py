"""TRL's own tests of its GRPO trainer, with theirs and with ours in its place.

Their models and datasets come from a hub; here tiny ones of the same kinds are made under the same names, in
a folder that the tests run in, with random weights and a tokenizer of bytes.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PUBLISHER = "trl-internal-testing"
TINY = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
}
CAUSAL = {
    "Qwen2ForCausalLM-2.5": "qwen2_5",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLM-3.2": "llama3_2",
    "MistralForCausalLM-0.2": "qwen2_5",
    "Gemma2ForCausalLM": "gemma",
    "Cohere2ForCausalLM": "cohere2",
    "Qwen3MoeForCausalLM": "qwen3",
    "Glm4MoeForCausalLM": "glm4moe",
    "GptOssForCausalLM": "gptoss",
}
"""By name: the chat template among TRL's."""
CLASSIFIERS = "Qwen2ForSequenceClassification-2.5", "Qwen3ForSequenceClassification"
CLASSIFIERS_OF_LLAMA = ("LlamaForSequenceClassification-3.2",)
OF_SOME = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "head_dim": 8,
}
WORDS = "Beautiful", "Explicit", "Simple", "Complex", "Flat", "Sparse", "Practicality", "Now", "Never"
PROMPTS = [f"{word} is better than" for word in WORDS] + [f"{word} counts" for word in WORDS[:8]]
OUTCOME = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED|XFAIL)\S* (\S+)", re.MULTILINE)


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """Bytes; ends with <|im_end|>."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*specials, *letters])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.add_tokens(specials[3:])
    made.chat_template = files("trl").joinpath(f"chat_templates/{template}.jinja").read_text()
    return made


def make_model(folder: Path, name: str, template: str) -> None:
    architecture = name.split("-")[0]
    tokens = tokenizer(template)
    family = re.sub(r"For(CausalLM|SequenceClassification)$", "", architecture)
    config_class = getattr(transformers, f"{family}Config")
    known = config_class().to_dict()
    sizes = TINY | {key: value for key, value in OF_SOME.items() if key in known}
    if "Classification" in architecture:
        sizes["num_labels"] = 1
    config = config_class(
        vocab_size=len(tokens),
        pad_token_id=tokens.pad_token_id,
        eos_token_id=tokens.eos_token_id,
        bos_token_id=tokens.bos_token_id,
        **sizes,
    )
    transformers.set_seed(0)
    model = getattr(transformers, architecture)(config)
    model.save_pretrained(folder / PUBLISHER / f"tiny-{name}")
    tokens.save_pretrained(folder / PUBLISHER / f"tiny-{name}")


def make_dataset(folder: Path) -> None:
    """`zen`, with the columns of its parts for prompts."""
    zen = folder / PUBLISHER / "zen"
    kinds: Mapping[str, list[Any]] = {
        "standard_prompt_only": PROMPTS,
        "conversational_prompt_only": [[{"role": "user", "content": f"What is {each}?"}] for each in PROMPTS],
    }
    described = ["---", "configs:"]
    for kind, prompts in kinds.items():
        described += [f"- config_name: {kind}", "  data_files:"]
        for split, some in (("train", prompts), ("test", prompts[:2])):
            (zen / kind).mkdir(parents=True, exist_ok=True)
            Dataset.from_dict({"prompt": some}).to_parquet(zen / kind / f"{split}.parquet")
            described += [f"  - split: {split}", f"    path: {kind}/{split}.parquet"]
    (zen / "README.md").write_text("\n".join([*described, "---", ""]))


def make_all(folder: Path) -> None:
    make_dataset(folder)
    for name, template in CAUSAL.items():
        make_model(folder, name, template)
    for name in CLASSIFIERS:
        make_model(folder, name, "qwen2_5")
    for name in CLASSIFIERS_OF_LLAMA:
        make_model(folder, name, "llama3_2")


def outcomes(tests: Path, folder: Path, *, ours: bool, only: str = "") -> dict[str, str]:
    """Returns the outcome of each test by name, run in `folder`. tests: TRL's file."""
    swap = "import trl\nfrom grpo.trl import GRPOTrainer\ntrl.GRPOTrainer = GRPOTrainer\n" if ours else ""
    (folder / "swapped_trainer.py").write_text(swap)
    path = os.pathsep.join([str(folder), *sys.path])
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(tests),
        "-p",
        "swapped_trainer",
        "-rA",
        "-q",
        "--tb=line",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        f"--rootdir={tests.parents[1]}",
    ]
    if only:
        command += ["-k", only]
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    (folder / f"{'ours' if ours else 'stock'}.log").write_text(done.stdout + done.stderr)
    return {name.split("::", 1)[-1]: outcome for outcome, name in OUTCOME.findall(done.stdout)}
