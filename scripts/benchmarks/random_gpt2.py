"""A GPT-2 with random weights and rook-tiny's tokenizer: for trials of the machinery."""

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel

from grpo.model.names import BUNDLED_FOLDER

GPT2_124M = {"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
SHAPE_OF_30M = {"n_layer": 8, "n_head": 8, "n_embd": 512, "n_positions": 512}


def make_random_gpt2(folder: Path, **shape: int) -> Path:
    """Write the model folder: two layers 32 wide, but for `shape` by GPT2Config's names (n_layer, …)."""
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
