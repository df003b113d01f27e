"""`score` as scripts of earlier versions call it: log-probs in padded rows, see `scoring/logprobs.py`."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from grpo.scoring import logprobs
from grpo.types import Batch


def score(model: PreTrainedModel, rollout: Batch, **options: Any) -> Tensor:
    """Returns log-probs (N, C) of a step's tokens, 0 on the right of shorter rows; see `logprobs.score`."""
    return rollout.padded(logprobs.score(model, rollout, **options))
