"""A model made from a few numbers, for whoever has none: random weights, bytes or a tokenizer of its own.

Its numbers are settings, so transformers is imported where a shape is made of them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from grpo.config import SettingsError
from grpo.config.limits import COUNT, at_least, check_limits

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OR_NONE = at_least(1, "give at least 1, or leave it out")


@dataclass(frozen=True)
class MadeModel:
    """A causal language model from numbers, if `arch` is given; else --model names one."""

    arch: Literal["gpt2", "llama"] | None = None
    """Make a model of this architecture, with random weights, from the numbers below (lm)."""
    layers: Annotated[int, COUNT] = 4
    """Transformer blocks."""
    width: Annotated[int, COUNT] = 256
    """Residual width."""
    d_ff: Annotated[int | None, OR_NONE] = None
    """Width of the feed-forward layers; None: 4 times width (gpt2), 8/3 times, in steps of 64 (llama)."""
    heads: Annotated[int, COUNT] = 4
    """Attention heads."""
    kv_heads: Annotated[int | None, OR_NONE] = None
    """Heads of keys and values (llama); None: as many."""
    vocab: Annotated[int, COUNT] = 256
    """Entries of the vocabulary; 256 are bytes."""
    context: Annotated[int, COUNT] = 256
    """Tokens of a training window (lm); a model that is made reaches as many."""
    rope_theta: float = 10000.0
    """Base of the rotary positions (llama)."""
    untied: bool = False
    """An output head of its own instead of the embedding's transpose."""

    def __post_init__(self) -> None:
        check_limits(self)
        if self.width % self.heads:
            raise SettingsError(f"width is {self.width}, not a multiple of {self.heads} heads: change one.")
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise SettingsError(
                f"kv_heads is {self.kv_heads}, no divisor of {self.heads} heads: give one, or leave it out."
            )
        if self.arch == "llama" and self.width // self.heads % 2:
            raise SettingsError(
                f"heads of width {self.width // self.heads} cannot be rotated in pairs: "
                "choose width and heads so that one is a multiple of two of the other."
            )

    @property
    def name(self) -> str:
        return f"{self.arch} {self.layers} x {self.width}, vocabulary {self.vocab}"

    def config(self) -> "PretrainedConfig":
        """Its shape, dropout off."""
        from transformers import GPT2Config, LlamaConfig

        common = {
            "vocab_size": self.vocab, "tie_word_embeddings": not self.untied,
            "bos_token_id": 0, "eos_token_id": 0,
        }  # fmt: skip
        if self.arch == "gpt2":
            return GPT2Config(
                n_positions=self.context, n_embd=self.width, n_layer=self.layers, n_head=self.heads,
                n_inner=self.d_ff, activation_function="gelu_pytorch_tanh", resid_pdrop=0.0, embd_pdrop=0.0,
                attn_pdrop=0.0, **common,
            )  # fmt: skip
        return LlamaConfig(
            max_position_embeddings=self.context, hidden_size=self.width,
            intermediate_size=self.d_ff or -(-8 * self.width // (3 * 64)) * 64,
            num_hidden_layers=self.layers, num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads or self.heads,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta}, **common,
        )  # fmt: skip
