"""The reference: a copy or the policy without adapters, and that it follows the policy exactly."""

import dataclasses
import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from grpo.config import SettingsError, from_flat
from grpo.config.groups import LoraSettings
from grpo.model.adapters import adapter_parameters, add_adapters
from grpo.model.reference import make_reference
from grpo.run.interrupt import StopRequest
from grpo.run.setup import open_run
from grpo.trainer import Trainer

pytestmark = pytest.mark.usefixtures("made_up_plans")

CPU = torch.device("cpu")
IDS = torch.tensor([[5, 6, 7, 8, 9]])


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model(input_ids=IDS).logits


def scores(reference) -> torch.Tensor:
    with reference.model() as model:
        return logits(model)


@pytest.fixture(params=[0, 4], ids=["copy", "adapters"])
def policy(request, load):
    model = load("gpt2").model
    if request.param:
        add_adapters(model, LoraSettings(lora_rank=request.param))
    return model


def move(model) -> None:
    generator = torch.Generator().manual_seed(0)
    for parameter in adapter_parameters(model).values() or model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)


def test_it_stays_what_the_policy_was_until_it_follows(policy):
    reference, first = make_reference(policy, CPU), logits(policy)
    move(policy)
    assert torch.equal(scores(reference), first) and not torch.equal(logits(policy), first)
    reference.sync(policy)
    second = logits(policy)
    assert torch.equal(scores(reference), second)
    move(policy)
    assert torch.equal(scores(reference), second) and not torch.equal(logits(policy), second)


def test_what_it_has_become_can_be_saved_and_restored(policy):
    reference = make_reference(policy, CPU)
    other = make_reference(policy, CPU)
    assert reference.tensors() == {}
    reference.restore({})  # nothing changes
    move(policy)
    reference.sync(policy)
    saved = reference.tensors()
    assert len(saved) == len(adapter_parameters(policy) or list(policy.parameters()))
    move(policy)
    other.restore(saved)
    assert torch.equal(scores(other), scores(reference))
    assert other.tensors().keys() == saved.keys()


def test_gradients_are_the_policys_alone(policy):
    reference = make_reference(policy, CPU)
    wanted = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    scores(reference)
    reference.sync(policy)
    scores(reference)
    assert {name for name, parameter in policy.named_parameters() if parameter.requires_grad} == wanted
    with reference.model() as model:
        if model is not policy:
            assert not any(parameter.requires_grad for parameter in model.parameters())


# --------------------------------------------------------------------------------------------- runs


def trained(config, **changes):
    config = dataclasses.replace(config, **changes)
    with open_run(config) as run:
        Trainer(run, Console(quiet=True)).train(StopRequest())
    return run


def kls(run) -> list[float]:
    lines = map(json.loads, (run.folder / "metrics.jsonl").read_text().splitlines())
    return [metrics["kl"] for metrics in lines if "kl" in metrics]


@pytest.mark.parametrize("rank", [0, 4], ids=["copy", "adapters"])
def test_a_resumed_run_has_the_reference_it_had(config, rank):
    """Step 3 is scored by the policy of step 2, and so is step 4, after the kill."""
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e-2)
    config = dataclasses.replace(
        config, reference_sync=2, lora=LoraSettings(lora_rank=rank), optimizer=optimizer, eval_interval=0
    )
    straight = trained(config)
    cut = trained(config, name="cut", steps=3)
    resumed = trained(config, resume=cut.folder)
    assert kls(resumed) == kls(straight)
    assert kls(straight)[2] < 1e-6 < kls(straight)[1]  # just become the policy
    for file in ("trainer", "reference", "adapter_model" if rank else "model"):
        name = f"checkpoints/step-000004/{file}.safetensors"
        ours, theirs = load_file(resumed.folder / name), load_file(straight.folder / name)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], tensor) for key, tensor in theirs.items())


def test_a_reference_that_never_follows_is_in_no_checkpoint(config):
    run = trained(config, steps=1)
    assert not (run.folder / "checkpoints/step-000001/reference.safetensors").exists()


def test_without_a_reference_nothing_can_follow():
    with pytest.raises(SettingsError, match="reference_sync is 3, but kl_coef is 0"):
        from_flat({"reference_sync": 3, "kl_coef": 0.0})
    with pytest.raises(SettingsError, match="reference_sync is -1: give 0 or more"):
        from_flat({"reference_sync": -1})
