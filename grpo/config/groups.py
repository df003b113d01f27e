"""Settings of single pieces of code, which can be made alone too, and the words they are chosen from.

A class is a section of the help, the first line of its docstring the title, and a string below a field its
text. A function that wants one of these classes takes a `Config`, which inherits them all. Nothing large
is imported here: a wrong flag need not wait for torch, which takes seconds to load.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from grpo.config.limits import DECAY, NOT_NEGATIVE, PART, POSITIVE, SHARE, Limit, Settings, at_least

Precision = Literal["auto", "fp32", "bf16", "fp16", "fp64"]
Checkpointing = Literal["none", "full"]
CheckpointingSetting = Literal["auto", "none", "full"]
Scale = Literal["group", "batch", "none"]
LossType = Literal["grpo", "dapo", "dr_grpo", "cispo"]

BUNDLED = "rook-tiny"
"""The model that comes with the package."""
_CISPO_CAP = 5.0


@dataclass(frozen=True)
class SamplingSettings(Settings):
    """Sampling."""

    max_new_tokens: Annotated[int, at_least(1)] = 144
    """Longest completion in tokens, the end-of-text token included. Where nothing is said, prompts and
    rewards of your own get 512, or half of a smaller context."""
    temperature: Annotated[float, at_least(0, "give 0 (greedy) or more (usual: 1.0)")] = 1.0
    """Logits are divided by it, here and where completions are scored; 0 is greedy (evaluation only)."""
    top_k: Annotated[int, at_least(0, "give 0 (all tokens) or more")] = 0
    """Sample among the k most likely tokens only; 0 for all."""
    top_p: Annotated[float, PART] = 1.0
    """Sample among the fewest tokens that hold this much probability; 1 for all."""
    min_p: Annotated[float, SHARE] = 0.0
    """Sample among tokens that are at least this many times as probable as the likeliest; 0 for all."""
    stop: Annotated[tuple[str, ...], Limit(all, "leave out the empty text, which all begin with")] = ()
    """Texts any of which ends a completion, which is learned from up to the token that completes it;
    "\\n" is a line's end."""

    ignore_ends: bool = False
    """Give every completion max_new_tokens, whatever the model writes: to try out memory and speed."""

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """As they stand in a completion; a shell has no line's ends."""
        if self.ignore_ends:
            return ()
        return tuple(text.replace("\\n", "\n").replace("\\t", "\t") for text in self.stop)


@dataclass(frozen=True)
class PromptSettings(Settings):
    """The prompts: how a row of data becomes what the model is asked."""

    prompt_column: str | None = None
    """The column that is asked, text or messages; None: prompt (for chess: text, or fen)."""
    prompt_template: Path | None = None
    """A file with what is asked instead, in Jinja: {{ question }} stands for a row's column of that name."""
    system_prompt: Annotated[str | None, Limit(str.strip, "say something in it, or leave it out")] = None
    """A system message before what is asked, which makes text a conversation."""
    chat: Literal["auto", "on", "off"] = "auto"
    """Whether text is a user's message, which the chat template renders; auto: with system_prompt or
    chat_template, and with prompt_template if the tokenizer has a chat template. Messages always are."""
    chat_template: Path | None = None
    """A file with a chat template (Jinja) instead of the tokenizer's own."""
    trailing_space: bool = False
    """End policy prompts with a space, as some of RookWorld's own scripts do."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.chat == "off" and (self.system_prompt is not None or self.chat_template is not None):
            other = "chat_template" if self.system_prompt is None else "system_prompt"
            yield f"chat is off, but {other} is given: leave one of the two out."

    @property
    def has_custom_prompts(self) -> bool:
        """Whether anything is said about how prompts of the user's are asked."""
        return self.chats or self.prompt_column is not None or self.prompt_template is not None

    @property
    def chats(self) -> bool:
        """Whether text is a user's message, whatever the tokenizer has."""
        return self.chat == "on" or self.system_prompt is not None or self.chat_template is not None


@dataclass(frozen=True)
class LossSettings(Settings):
    """The loss."""

    loss_type: LossType = "dapo"
    """grpo: each row's mean over its tokens; dapo: mean over the step's tokens; dr_grpo: sum over
    rows × maximum length; cispo: the ratio only weights the log-prob, capped, without gradient."""
    clip_range: Annotated[float, Limit(lambda part: 0 < part < 1, "give more than 0 and less than 1")] = 0.2
    """The ratio's lower clip is 1 - clip_range."""
    clip_range_high: float | None = None
    """The ratio's upper clip is 1 + clip_range_high (None: clip_range; DAPO recommends 0.28). For
    cispo it is the cap itself (None: 5.0, as ScaleRL recommends)."""
    dual_clip: float | None = None
    """Cap on the ratio where the advantage is negative (Ye et al. 2020; TRL calls it delta). Usually 3."""
    importance_level: Literal["token", "sequence"] = "token"
    """One ratio per token, or one per sequence: the geometric mean of its tokens' (GSPO)."""
    kl_coef: Annotated[float, at_least(0, "give 0 or more (usual: 0 to 0.1)")] = 0.02
    """Weight of the KL divergence from the reference model; 0 needs no reference."""
    kl_estimator: Literal["k3", "k2"] = "k3"
    """k3 (unbiased, never negative) or k2 (half the squared log-ratio), named by Schulman (2020)."""
    kl_correction: bool = True
    """Weight the KL by the ratio, so that its gradient is the reverse KL's (TRL: use_bias_correction_kl)."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        is_cispo, high = self.loss_type == "cispo", f"clip_range_high is {self.clip_range_high}"
        if is_cispo and not self.ratio_high >= 1:
            yield f"{high}, which is cispo's cap on the ratio itself: give 1 or more (usual: 5.0)."
        if not is_cispo and not self.ratio_high > 1:
            yield f"{high}: give more than 0 (usual: 0.2 to 0.28)."
        if self.dual_clip is not None and is_cispo:
            yield f"dual_clip is {self.dual_clip}, but cispo caps every ratio: leave it out."
        if self.dual_clip is not None and not self.dual_clip > self.ratio_high:
            yield f"dual_clip is {self.dual_clip}: give more than the upper clip, {self.ratio_high}."

    @property
    def uses_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def is_per_token(self) -> bool:
        """Whether what a token adds to the loss depends on no other token's log-prob."""
        return self.importance_level == "token"

    @property
    def ratio_low(self) -> float:
        """The ratio below which a negative advantage no longer pushes."""
        return 1 - self.clip_range

    @property
    def ratio_high(self) -> float:
        """The ratio above which a positive advantage no longer pushes; cispo's cap."""
        if self.loss_type == "cispo":
            return _CISPO_CAP if self.clip_range_high is None else self.clip_range_high
        return 1 + (self.clip_range if self.clip_range_high is None else self.clip_range_high)


@dataclass(frozen=True)
class OptimizerSettings(Settings):
    """The optimizer."""

    optimizer_kind: Literal["adamw", "adamw8bit"] = "adamw"
    """adamw8bit: moments in 8 bits (bitsandbytes), two bytes a trained parameter instead of eight."""
    learning_rate: Annotated[float, NOT_NEGATIVE] = 1e-5
    """Peak learning rate."""
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    """After the warm-up: constant, or down to the floor along a cosine or a line."""
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps of linear warm-up from zero; as large a share of the run where its minutes end it."""
    min_lr_ratio: Annotated[float, SHARE] = 0.1
    """Floor of the schedule, as a share of the peak."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    """Decoupled weight decay of matrices; norms and biases have none."""
    adam_beta1: Annotated[float, DECAY] = 0.9
    """Decay of the gradient's running mean."""
    adam_beta2: Annotated[float, DECAY] = 0.999
    """Decay of the squared gradient's running mean."""
    max_grad_norm: Annotated[float, NOT_NEGATIVE] = 1.0
    """Gradients are scaled down to this global norm; 0 for no clipping."""


@dataclass(frozen=True)
class LoraSettings(Settings):
    """Adapters (LoRA)."""

    lora_rank: Annotated[int, at_least(0, "give 0 or more (usual: 16)")] = 0
    """Train adapters of this rank (LoRA) and leave the model's own weights as they are; 0: no adapters."""
    lora_alpha: Annotated[float | None, POSITIVE, NOT_NEGATIVE] = None  # which is finite
    """Adapters are scaled by lora_alpha / lora_rank; None: twice the rank, the same scale at any rank."""
    lora_targets: tuple[str, ...] = ()
    """Linear layers with adapters, by the end of their names, or all-linear; none given: peft's choice."""
    lora_merge: bool = False
    """Write the model with its adapters merged in, too, as merged/ in each checkpoint."""
    load_in_4bit: bool = False
    """Hold the model's own weights in 4 bits (QLoRA: NF4 by bitsandbytes), the reference's among them."""

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        for name in ("lora_alpha", "lora_targets", "lora_merge", "load_in_4bit"):
            value = getattr(self, name)
            if value and not self.uses_lora:
                yield f"{name} is {value}, but lora_rank is 0: add --lora-rank 16, or leave it out."

    @property
    def uses_lora(self) -> bool:
        return self.lora_rank > 0

    @property
    def used_alpha(self) -> float:
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
