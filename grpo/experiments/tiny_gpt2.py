"""A GPT-2 of two layers with random weights and rook-tiny's tokenizer: for trials of the machinery."""

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from grpo.model import BUNDLED_FOLDER


def make_tiny_gpt2(folder: Path, **shape: int) -> Path:
    """Write the model folder; `shape` overrides GPT2Config's names (n_layer, n_embd, …)."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(BUNDLED_FOLDER / name, folder / name)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 256, "vocab_size": len(tokenizer)}
    end = tokenizer.eos_token_id
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(**{**sizes, **shape}, bos_token_id=end, eos_token_id=end)).save_pretrained(
        folder
    )
    return folder
