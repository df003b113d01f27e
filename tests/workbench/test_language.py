"""Learning from windows of text."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from grpo.workbench.language import window_logprobs


def test_embeddings_have_the_same_gradient_in_place(monkeypatch):
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=500, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    policy, windows = GPT2LMHeadModel(config).double().eval(), torch.randint(500, (3, 12))

    def gradient() -> torch.Tensor:
        policy.zero_grad(set_to_none=True)
        window_logprobs(policy, windows, dtype=torch.float64).sum().backward()
        return policy.transformer.wte.weight.grad.clone()

    ours = gradient()
    monkeypatch.setattr("grpo.model.cpu.embedding_gradients.is_sharded", lambda model: True)
    torch.testing.assert_close(ours, gradient(), rtol=1e-12, atol=1e-14)
