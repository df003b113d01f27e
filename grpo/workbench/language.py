"""Plain language modelling, which the workbench compares with: learning from windows of text."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing
from grpo.learning.step import begin_gradients
from grpo.memory import Size
from grpo.model.activation_checkpointing import recomputed_layers
from grpo.model.cpu.embedding_gradients import gradients_in_place
from grpo.plan.phases_at import PhasesAt
from grpo.scoring.forward import empty_cache
from grpo.scoring.logprobs import TokenLoss, completion_logprobs
from grpo.scoring.micro_batches import computing_in


def window_logprobs(
    model: PreTrainedModel, windows: Tensor, *, dtype: torch.dtype, loss: TokenLoss | None = None
) -> Tensor:
    """Log-probs (R, T) of each token but the first of `windows` (R, T + 1), in nats, with gradients.

    loss: see `completion_logprobs`.
    """
    windows = windows.to(model.device)
    with computing_in(dtype, model.device):
        with gradients_in_place(model):
            hidden = model.base_model(
                input_ids=windows[:, :-1], past_key_values=empty_cache(model), use_cache=True
            ).last_hidden_state  # (R, T, D)
        head = model.get_output_embeddings()
        logp, _ = completion_logprobs(hidden, head.weight, windows[:, 1:], bias=head.bias, loss=loss)
    return logp


def accumulate_lm(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    dtype: torch.dtype,
    rows: int,
    checkpointing: Checkpointing = "none",
) -> dict[str, float]:
    """Plain language modelling: add the gradient of the mean loss over `windows` (N, T + 1).

    Every token but a window's first is predicted. The split into `rows` at a time changes nothing.
    Returns the loss in nats a token.
    """
    num_tokens = windows[:, 1:].numel()
    exact = torch.float32 if model.device.type == "mps" else torch.float64

    def mean_loss(logp: Tensor) -> Tensor:
        return -logp.sum() / num_tokens

    total = torch.zeros((), device=model.device, dtype=exact)
    begin_gradients(model)
    with recomputed_layers(model, checkpointing):
        for part in windows.split(rows):
            loss = mean_loss(window_logprobs(model, part, dtype=dtype, loss=mean_loss))
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
    return {"loss": total.item()}


@torch.no_grad()
def heldout_loss(
    model: PreTrainedModel, windows: Tensor, *, dtype: torch.dtype, rows: int
) -> tuple[float, float]:
    """Mean loss over `windows` (N, T + 1) in nats a token, and its standard error over windows."""
    losses = torch.cat([-window_logprobs(model, part, dtype=dtype).mean(1) for part in windows.split(rows)])
    spread = losses.std().item() / len(losses) ** 0.5 if len(losses) > 1 else 0.0
    return losses.mean().item(), spread


class WindowPhases(PhasesAt):
    """Learning from windows of `tokens`, the one phase that there is."""

    def learn(self, size: Size) -> None:
        self.begin_gradients()
        windows = torch.zeros(size.rows, 1 + size.tokens, dtype=torch.long)
        with recomputed_layers(self.policy, self.settings.checkpointing):
            logp = window_logprobs(self.policy, windows, dtype=self.settings.target.dtype, loss=Tensor.sum)
            logp.sum().backward()  # type: ignore[no-untyped-call]
        self.forget()
