"""How keys and values grow within a rollout: the static cache beside Hugging Face's growing one.

Measured, not computed: tensor bytes are counted while tokens are decoded, so that what the growing
cache holds twice, while it concatenates, shows.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from grpo.memory.live import LiveBytes
from grpo.model.load import RolloutModel, load_policy
from grpo.model.target import choose_device
from grpo.rollout.decoder import Decoder, has_static_cache
from grpo.rollout.generic import GenericDecoder
from grpo.rollout.native import NativeDecoder
from grpo.workbench.pictures import picture

MB = 2**20


@dataclass(frozen=True)
class Growth:
    """Bytes of one cache after each generated token: held between tokens, and at most during one."""

    name: str
    held_bytes: list[int]
    peak_bytes: list[int]


@torch.no_grad()
def measure_growth(
    model_name: str, *, num_prompts: int, group_size: int, prompt_tokens: int, new_tokens: int
) -> list[Growth]:
    """Both caches on the same model and shape. ValueError for a model that has no static one."""
    policy = load_policy(model_name, choose_device("cpu"))
    model = RolloutModel(policy.model, policy.target.dtype).model
    if not has_static_cache(model):
        raise ValueError(f"model {model_name!r} has no static cache to compare with: give a GPT-2.")
    decoders: dict[str, Decoder] = {
        "static, prompt shared": NativeDecoder(model, new_tokens),
        "growing (Hugging Face)": GenericDecoder(model),
    }
    prompts = [[1] * prompt_tokens] * num_prompts
    return [_decode(name, decoder, prompts, group_size, new_tokens) for name, decoder in decoders.items()]


def _decode(
    name: str, decoder: Decoder, prompts: list[list[int]], group_size: int, new_tokens: int
) -> Growth:
    held, peak = [], []
    tokens = torch.ones(len(prompts) * group_size, dtype=torch.long)
    with LiveBytes() as live:
        decoder.prefill(prompts, group_size)
        for _ in range(new_tokens - 1):
            live.reset_peak()
            decoder.next_step()[1](tokens)
            held.append(decoder.cache_bytes.held)
            peak.append(live.peak_bytes)
    return Growth(name, held, peak)


def draw_growth(growths: list[Growth], file: Path) -> None:
    """Bytes held over tokens generated, and the peak while each token is added."""
    with picture(file, (7, 4)) as axes:
        for growth, color in zip(growths, ("C0", "C1"), strict=True):
            tokens = range(1, len(growth.held_bytes) + 1)
            axes.plot(tokens, [size / MB for size in growth.held_bytes], color=color, label=growth.name)
            peaks = [size / MB for size in growth.peak_bytes]
            axes.plot(tokens, peaks, color=color, linestyle=":", label="peak while a token is added")
        axes.set(xlabel="tokens generated", ylabel="MB (2**20 bytes)", ylim=(0, None))
        axes.legend(frameon=False)
