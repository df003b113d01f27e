"""Whether a model can be trained here, found out on made-up tokens before anything slow begins."""

import torch
from transformers import PreTrainedModel

from grpo.errors import UserError
from grpo.model.attention import needs_no_mask
from grpo.model.prefill import crossed_window, large_logits, pad_prompts
from grpo.model.stand_ins import NEVER, exact_products
from grpo.scoring.micro_batches import MicroBatch, token_logprobs


@exact_products()
@torch.no_grad()
def check_scorer(model: PreTrainedModel, context: int) -> None:
    """ValueError unless log-probs are those of the model's own forward pass.

    They are not for a model that does more to its logits than a linear layer does (Gemma 2, Cohere,
    Granite), or whose attention minds what stands between prompt and completion (GPT-Neo). What a soft cap
    does shows in large logits alone, so logits are compared as large as a trained model's, too.
    """
    length = min(280, context)
    masks = (False, True) if needs_no_mask(model.config._attn_implementation) else (False,)
    with crossed_window(model, length):
        for equal in masks:  # prompts of one length go another way there
            _check_scorer(model, made_up_batch(model, length, equal=equal))
        with large_logits(model):
            _check_scorer(model, made_up_batch(model, length))


def _check_scorer(model: PreTrainedModel, batch: MicroBatch) -> None:
    try:
        ours = batch.padded(token_logprobs(model, batch, temperature=1.0, dtype=model.dtype)[0])
    except (TypeError, AttributeError, ValueError, NotImplementedError) as error:
        raise UserError(f"{type(model).__name__} cannot be trained here: {error}") from error
    for row, (prompt, length) in enumerate(zip(batch.prompts.ids, batch.prompts.lengths, strict=True)):
        ids = torch.cat([prompt[:length], batch.completion_ids[row]]).to(model.device).unsqueeze(0)
        # With a mask of its own making the model's pass would share a fault of ours in making none.
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[0, -5:-1]
        theirs = logits.log_softmax(-1).gather(1, ids[0, -4:].unsqueeze(1)).squeeze(1)
        difference = (ours[row].clamp(min=NEVER) - theirs.clamp(min=NEVER)).abs().max().item()
        if not difference < 1e-3:
            raise UserError(
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
