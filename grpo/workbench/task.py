"""What one process of the workbench trains: settings of train_lean.py, and what language modelling wants.

A trial of find-max, a size of a sweep and a try of a learning rate are tasks; `trial.py` does one. All of
it is settings, so transformers is imported where a model's shape is made of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from grpo.config import Config, SettingsError, from_plain, to_plain
from grpo.config.groups import BUNDLED
from grpo.config.limits import COUNT, at_least, check_limits

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Objective = Literal["grpo", "lm"]
"""What is trained for: GRPO, or plain language modelling."""
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

    def config(self) -> "PretrainedConfig":
        """Its shape, dropout off."""
        from transformers import AutoConfig

        special: dict[str, Any] = {
            "gpt2": {
                "n_inner": self.d_ff, "activation_function": "gelu_pytorch_tanh", "resid_pdrop": 0.0,
                "embd_pdrop": 0.0, "attn_pdrop": 0.0,
            },
            "llama": {
                "intermediate_size": self.d_ff or -(-8 * self.width // (3 * 64)) * 64,
                "num_key_value_heads": self.kv_heads or self.heads,
                "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            },
        }  # fmt: skip
        return AutoConfig.for_model(
            self.arch, hidden_size=self.width, num_hidden_layers=self.layers, num_attention_heads=self.heads,
            max_position_embeddings=self.context, vocab_size=self.vocab, tie_word_embeddings=not self.untied,
            bos_token_id=0, eos_token_id=0, **special[self.arch or "gpt2"],
        )  # fmt: skip


@dataclass(frozen=True)
class Task:
    """Steps at one batch size. `train` says everything that it says for a run, but the batch size of lm."""

    objective: Objective = "grpo"
    train: Config = field(default_factory=Config)
    batch_size: int = 64
    """Completions (grpo), or windows of `made.context` tokens (lm), a step."""
    made: MadeModel = field(default_factory=MadeModel)
    data: str | None = None
    compile: bool = False
    tf32: bool = False
    prompt_tokens: int | None = None
    """If given, all prompts are made up, with so many tokens, and rewards are drawn at random (grpo)."""
    tuned: Sequence[Mapping[str, float | None]] = ()
    """The learning rates that were tried before, each with the held-out quality that it came to."""

    @property
    def rows(self) -> int:
        """In one backward pass."""
        return min(self.batch_size, self.train.train_rows or self.batch_size)

    def as_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        flat = {item.name: getattr(self, item.name) for item in fields(self)}
        return flat | {"train": to_plain(self.train), "made": asdict(self.made)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Task":
        """What `as_json` made."""
        return cls(**{**values, "train": from_plain(values["train"]), "made": MadeModel(**values["made"])})


def model_name(train: Config, made: MadeModel) -> str:
    """Of the model that is meant."""
    if made.arch is not None:
        return f"{made.arch} {made.layers} x {made.width}, vocabulary {made.vocab}"
    return BUNDLED if train.model == "auto" else train.model


def settled(train: Config, made: MadeModel) -> Config:
    """With the model that auto means on its device, as a run takes it. ValueError for a missing device."""
    if made.arch is not None:
        return train
    from grpo.model.target import choose_device, choose_model

    return replace(train, model=choose_model(train.model, choose_device(train.device)))


def model_shape(train: Config, made: MadeModel) -> "PretrainedConfig":
    """ValueError where a named model cannot be had."""
    if made.arch is not None:
        return made.config()
    from grpo.model.load import shape_of

    return shape_of(model_name(train, made))


def alone(train: Config, **changes: Any) -> Config:
    """The settings of a run whose every row is on the device at once, or it has run out of memory."""
    return replace(
        train, memory_utilization=1.0, minutes=None, resume=None, dry_run=False, device_memory=None,
        checkpoint_interval=0, trackers=(), show_completions=0, **changes,
    )  # fmt: skip
