"""Whether a model can be trained here, found out on made-up tokens before anything slow begins."""

import math

import torch
from torch import Tensor
from transformers import PreTrainedModel

from grpo.config.groups import Checkpointing
from grpo.distributed.shard import decoder_layers, is_sharded, whole
from grpo.memory import is_out_of_memory
from grpo.model.lower_right import needs_no_mask
from grpo.model.prefill import crossed_window, pad_prompts
from grpo.model.stand_ins import NEVER, exact_products
from grpo.scoring.micro_batches import MicroBatch, micro_batch_logprobs


@exact_products()
@torch.no_grad()
def check_scorer(model: PreTrainedModel, context: int) -> None:
    """ValueError unless log-probs are those of the model's own forward pass.

    They are not for a model that does more to its logits than a linear layer does (Gemma 2, Cohere,
    Granite), or whose attention minds what stands between prompt and completion (GPT-Neo).
    """
    length = min(280, context)
    masks = (False, True) if needs_no_mask(model.config._attn_implementation) else (False,)
    with crossed_window(model, length):
        for equal in masks:  # prompts of one length go another way there
            _check_scorer(model, made_up_batch(model, length, equal=equal))


def _check_scorer(model: PreTrainedModel, batch: MicroBatch) -> None:
    try:
        ours, _ = micro_batch_logprobs(model, batch, temperature=1.0, dtype=model.dtype)
    except (TypeError, AttributeError, ValueError, NotImplementedError) as error:
        raise ValueError(f"{type(model).__name__} cannot be trained here: {error}") from error
    for row, (prompt, length) in enumerate(zip(batch.prompts.ids, batch.prompts.lengths, strict=True)):
        ids = torch.cat([prompt[:length], batch.completion_ids[row]]).to(model.device).unsqueeze(0)
        # With a mask of its own making the model's pass would share a fault of ours in making none.
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -5:-1]
        theirs = logits.log_softmax(-1).gather(1, ids[0, -4:].unsqueeze(1)).squeeze(1)
        difference = (ours[row].clamp(min=NEVER) - theirs.clamp(min=NEVER)).abs().max().item()
        if not difference < 1e-3:
            raise ValueError(
                f"{type(model).__name__} cannot be trained here: its log-probs come out {difference:.3g} "
                "nats wrong, so its head or its attention is of a kind that is not supported; "
                "choose another --model."
            )


def made_up_batch(model: PreTrainedModel, length: int, *, equal: bool = False) -> MicroBatch:
    """Two rows of `length` tokens at most, 4 of them the completion, with prompts of their own.

    equal: their prompts are of one length.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(model.get_input_embeddings().num_embeddings, (2, length), generator=generator)
    other = length - 4 if equal else 5
    prompts, completions = [tokens[0, : length - 4].tolist(), tokens[1, :other].tolist()], tokens[:, -4:]
    return MicroBatch(torch.arange(2), pad_prompts(prompts), torch.arange(2), completions)


@torch.enable_grad()
def check_recomputation(
    model: PreTrainedModel, checkpointing: Checkpointing, batch: MicroBatch | None = None
) -> None:
    """ValueError unless all gradients are the same when layers are recomputed.

    batch: to try it on; None: made up. A model that does not say what its layers are has nothing to check
    with selective checkpointing, which leaves it as it is, and is refused with full.
    """
    if checkpointing == "none" or (
        checkpointing == "selective" and not any(decoder_layers(model.base_model))
    ):
        return
    batch = batch or made_up_batch(model, 24)
    plain = _gradients(model, batch, "none")
    try:
        pairs = zip(_gradients(model, batch, checkpointing), plain, strict=True)
        difference = math.hypot(*(whole((one - other).norm()).item() for one, other in pairs))
        difference /= math.hypot(*(whole(gradient.norm()).item() for gradient in plain))
        reason = f"its gradients come out {difference:.3g} wrong, relative to their norm"
    except RuntimeError as error:  # the second pass makes other tensors, or one that was kept was written to
        if is_out_of_memory(error):
            raise
        model.zero_grad(set_to_none=True)
        difference, reason = math.inf, str(error).splitlines()[0].rstrip(".")
    if not difference < 1e-3:
        raise ValueError(
            f"gradient_checkpointing is {checkpointing}, but {type(model).__name__} cannot be recomputed "
            f"layer by layer: {reason}; give none (fewer train_rows need less memory, too)."
        )


def _gradients(model: PreTrainedModel, batch: MicroBatch, checkpointing: Checkpointing) -> list[Tensor]:
    logp, _ = micro_batch_logprobs(
        model, batch, temperature=1.0, dtype=model.dtype, checkpointing=checkpointing
    )
    logp.sum().backward()  # type: ignore[no-untyped-call]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    if not is_sharded(model):  # where memory is short, the device has no room for two passes' gradients
        found = [gradient.cpu() for gradient in found]
    model.zero_grad(set_to_none=True)
    return found
