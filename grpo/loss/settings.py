"""Settings of the loss."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

LossType = Literal["grpo", "dapo", "dr_grpo", "cispo"]
ImportanceLevel = Literal["token", "sequence"]
KLEstimator = Literal["k3", "k2"]

_CISPO_CAP = 5.0


@dataclass(frozen=True)
class LossSettings:
    """What the loss is; a ValueError with the remedy when it is nothing sensible."""

    loss_type: LossType = "dapo"
    """grpo: each row's mean over its tokens; dapo: mean over the step's tokens; dr_grpo: sum over
    rows × maximum length; cispo: the ratio only weights the log-prob, capped, without gradient."""
    clip_range: float = 0.2
    """The ratio's lower clip is 1 - clip_range."""
    clip_range_high: float | None = None
    """The ratio's upper clip is 1 + clip_range_high (None: clip_range; DAPO recommends 0.28). For
    cispo it is the cap itself (None: 5.0, as ScaleRL recommends)."""
    dual_clip: float | None = None
    """Cap on the ratio where the advantage is negative (Ye et al. 2020; TRL calls it delta). Usually 3."""
    importance_level: ImportanceLevel = "token"
    """One ratio per token, or one per sequence: the geometric mean of its tokens' (GSPO)."""
    kl_coef: float = 0.02
    """Weight of the KL divergence from the reference model; 0 needs no reference."""
    kl_estimator: KLEstimator = "k3"
    """k3 (unbiased, never negative) or k2 (half the squared log-ratio), named by Schulman (2020)."""
    kl_correction: bool = True
    """Weight the KL by the ratio, so that its gradient is the reverse KL's (TRL: use_bias_correction_kl)."""

    def __post_init__(self) -> None:
        choices = {"loss_type": LossType, "importance_level": ImportanceLevel, "kl_estimator": KLEstimator}
        for name, choice in choices.items():
            if (value := getattr(self, name)) not in get_args(choice):
                raise ValueError(f"{name} is {value!r}; choose one of {', '.join(get_args(choice))}.")
        cispo, high = self.loss_type == "cispo", f"clip_range_high is {self.clip_range_high}"
        if not 0 < self.clip_range < 1:
            raise ValueError(f"clip_range is {self.clip_range}; it must lie between 0 and 1 (usual: 0.2).")
        if cispo and not self.ratio_high >= 1:
            raise ValueError(
                f"{high}; for cispo it is the cap on the ratio itself, and a cap below 1 shrinks every "
                "gradient. Give 1 or more (usual: 5.0)."
            )
        if not cispo and not self.ratio_high > 1:
            raise ValueError(f"{high}; it must be above 0 (usual: 0.2 to 0.28).")
        if self.dual_clip is not None and cispo:
            raise ValueError("dual_clip has no meaning for cispo, which caps every ratio; leave it out.")
        if self.dual_clip is not None and not self.dual_clip > self.ratio_high:
            raise ValueError(
                f"dual_clip is {self.dual_clip}; it must be above the upper clip, {self.ratio_high} "
                "(usual: 3)."
            )
        if not 0 <= self.kl_coef < math.inf:
            raise ValueError(f"kl_coef is {self.kl_coef}; it must be 0 or more (usual: 0 to 0.1).")

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
