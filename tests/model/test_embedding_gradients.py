"""Embeddings whose gradient goes straight to where it belongs: the same one, and no other of its size."""

import copy

import pytest
import torch
from test_gradient_checkpointing import COMPLETIONS_OF_PROMPTS, made_up
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from grpo.model.cpu.embedding_gradients import gradients_in_place
from grpo.scoring.micro_batches import micro_batch_logprobs

WORDS, D = 500, 16


def model(tied: bool = True, padding: int | None = None):
    torch.manual_seed(0)
    if padding is None and tied:
        return (
            GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=64, n_embd=D, n_layer=2, n_head=2))
            .double()
            .eval()
        )
    sizes = {"hidden_size": D, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=WORDS, pad_token_id=padding, tie_word_embeddings=tied, **sizes)
    return LlamaForCausalLM(config).double().eval()


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def learn(policy, *, times: int = 2) -> dict[str, torch.Tensor]:
    """Gradients of so many micro-batches."""
    policy.zero_grad(set_to_none=True)
    for seed in range(times):
        batch = made_up(COMPLETIONS_OF_PROMPTS, 9, seed)
        logp, _ = micro_batch_logprobs(policy, batch, temperature=1.0, dtype=torch.float64)
        weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(seed)).to(logp)
        (logp * weights).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}


def usual(policy, monkeypatch) -> dict[str, torch.Tensor]:
    """Gradients as autograd makes them."""
    with monkeypatch.context() as patch:
        patch.setattr("grpo.model.cpu.embedding_gradients.is_sharded", lambda model: True)
        return learn(policy)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("padding", [None, 7])
def test_gradients_are_autograds(monkeypatch, tied, padding):
    policy = model(tied, padding)
    expected = usual(policy, monkeypatch)
    torch.testing.assert_close(learn(policy), expected, rtol=1e-12, atol=1e-14)
    embeddings = expected[next(name for name in expected if "wte" in name or "embed_tokens" in name)]
    assert embeddings.norm() > 0.1
    assert not any("forward" in vars(module) for module in policy.modules())


def test_no_second_tensor_of_the_vocabulary_is_made(monkeypatch):
    """But the head's gradient; with autograd there are one for prompts, one for completions, and sums."""
    policy = model()

    def made() -> list[str]:
        policy.zero_grad(set_to_none=True)
        batch = made_up(COMPLETIONS_OF_PROMPTS, 9)
        logp, _ = micro_batch_logprobs(policy, batch, temperature=1.0, dtype=torch.float64)
        operations = []

        class Made(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                result = func(*args, **kwargs or {})
                given = {storage_of(each) for each in args if isinstance(each, torch.Tensor)}
                if getattr(result, "shape", None) == (WORDS, D) and storage_of(result) not in given:
                    operations.append(func.overloadpacket.__name__)
                return result

        with Made():
            logp.sum().backward()
        return operations

    assert made() == ["zeros_like"]
    monkeypatch.setattr("grpo.model.cpu.embedding_gradients.is_sharded", lambda model: True)
    assert made().count("embedding_dense_backward") == 2


def test_a_frozen_embedding_gets_nothing():
    policy = model(tied=False)
    policy.model.embed_tokens.weight.requires_grad_(False)
    logp, _ = micro_batch_logprobs(
        policy, made_up(COMPLETIONS_OF_PROMPTS, 9), temperature=1.0, dtype=torch.float64
    )
    logp.sum().backward()
    assert policy.model.embed_tokens.weight.grad is None and policy.lm_head.weight.grad is not None


def test_a_short_vocabulary_and_another_kind_of_embedding_are_left_to_autograd():
    policy = model()
    ids = torch.zeros(1, WORDS, dtype=torch.long)
    with gradients_in_place(policy):
        assert "_LookUp" not in str(policy.transformer.wte(ids).grad_fn)
        assert "_LookUp" in str(policy.transformer.wte(ids[:, 1:]).grad_fn)

    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(ids)

    policy.transformer.wte.__class__ = Scaled
    with gradients_in_place(policy):
        assert "forward" not in vars(policy.transformer.wte)


def test_an_embedding_with_a_forward_of_its_own_keeps_it():
    policy = model()
    embedding = policy.transformer.wte
    own = copy.copy(embedding.forward)
    embedding.forward = own
    with pytest.raises(KeyError), gradients_in_place(policy):
        raise KeyError
    assert embedding.forward is own
