"""Whether a model can be trained here, found out on made-up tokens before anything slow begins."""

import torch
from loguru import logger
from transformers import PretrainedConfig, PreTrainedModel

from grpo.errors import UserError
from grpo.memory import is_out_of_memory
from grpo.model.numerics import MIN_LOGP, MODEL_ERRORS, without_tf32
from grpo.model.prefill import large_logits, shrunk_sliding_window
from grpo.model.ways import READING, choose_reading, reading_of, why_not_fastest
from grpo.scoring.logprobs import token_logprobs
from grpo.scoring.stream import Texts


def made_up(model: PreTrainedModel, length: int, *, equal: bool = False) -> Texts:
    """Three rows of 4 tokens, two of one prompt that fills the rest of `length`, one of a prompt of 5 tokens.

    equal: the prompts are of one length.
    """
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    first, second = torch.randint(vocabulary, (2, length - 4), generator=generator).tolist()
    rows = torch.randint(vocabulary, (3, 4), generator=generator).tolist()
    return Texts([first, second if equal else second[:5]], [0, 0, 1], rows)


@without_tf32()
@torch.no_grad()
def check_scorer(model: PreTrainedModel, context: int, *shapes: PretrainedConfig) -> None:
    """Chooses the first way to score a model whose log-probs are those of the model's own forward pass.

    ValueError where none is so: of a head, mostly, that does something to its logits that `LogitRule` does
    not know. What a soft cap does shows in large logits alone, so logits are compared as large as a trained
    model's, too. A line says where it is not over streams. shapes: other copies of the model's configuration,
    by which its memory is planned.
    """
    name, length = type(model).__name__, min(280, context)
    reason = why_not_fastest(type(model), model.config)
    for way in READING[READING.index(reading_of(model)) :]:
        choose_reading(way, model.config, *shapes)
        wrong = _what_is_wrong(model, length)
        if wrong is None:
            if way != "streams":
                logger.info("{} is scored in {}, which is slower than over streams: {}", name, way, reason)
            return
        reason = wrong
    raise UserError(
        f"{name} cannot be trained here: {reason}, so its head or its attention is of a kind that is not "
        "supported; choose another --model."
    )


def _what_is_wrong(model: PreTrainedModel, length: int) -> str | None:
    texts = made_up(model, length)
    try:
        with shrunk_sliding_window(model, length):
            difference = _difference(model, texts)
            with large_logits(model):
                difference = max(difference, _difference(model, texts))
    except MODEL_ERRORS as error:
        if is_out_of_memory(error):
            raise
        return str(error).splitlines()[0].rstrip(".") or type(error).__name__
    return None if difference < 1e-3 else f"its log-probs come out {difference:.3g} nats wrong"


def _difference(model: PreTrainedModel, texts: Texts) -> float:
    """The largest between log-probs as they are scored and those of the model's own forward pass."""
    ours, _ = token_logprobs(model, texts.stream(), temperature=1.0, dtype=model.dtype)
    differences = []
    for row, (text, scored) in enumerate(zip(texts.whole(), ours.view(len(texts.rows), -1), strict=True)):
        ids, count = torch.tensor([text], device=model.device), len(texts.rows[row])
        # With a mask of its own making the model's pass would share a fault of ours in making none.
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
        log_probs = logits[0, -count - 1 : -1].log_softmax(-1)
        theirs = log_probs.gather(1, ids[0, -count:].unsqueeze(1)).squeeze(1)
        differences.append((scored.clamp(min=MIN_LOGP) - theirs.clamp(min=MIN_LOGP)).abs().max())
    return torch.stack(differences).max().item()
