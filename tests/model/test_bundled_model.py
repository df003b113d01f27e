"""rook-tiny: small, loaded like any other model, and as good as its card says."""

import json

import torch
from safetensors import safe_open

from grpo.config.groups import BUNDLED, SamplingSettings
from grpo.data import load_prompts
from grpo.evaluate import evaluate
from grpo.model.load import RolloutModel, load_policy
from grpo.model.names import BUNDLED_FOLDER


def test_it_is_a_small_folder_with_bf16_weights_and_a_tokenizer():
    assert sum(path.stat().st_size for path in BUNDLED_FOLDER.iterdir()) < 12e6
    assert (BUNDLED_FOLDER / "tokenizer.json").exists()
    assert json.loads((BUNDLED_FOLDER / "config.json").read_text())["model_type"] == "gpt2"
    with safe_open(BUNDLED_FOLDER / "model.safetensors", "pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


def test_it_plays_as_well_as_its_card_says():
    policy = load_policy(BUNDLED, torch.device("cpu"))
    prompts = load_prompts("bundled", seed=0, heldout_count=150).heldout
    result = evaluate(
        RolloutModel(policy.model, policy.target.dtype).model,
        policy.tokenizer,
        prompts,
        settings=SamplingSettings(max_new_tokens=96, temperature=0),
        rows=150,
        seed=0,
    )
    # What the start must be for learning to be worth watching; 150 prompts are good to about 8 points.
    assert min(result.mean("policy/format"), result.mean("environment/format")) > 0.93
    assert 0.5 < result.mean("environment/next_state") < 0.95
    assert 0.42 < result.mean("policy/legal") < 0.93
