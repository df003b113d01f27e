"""The rewards that come along, by name."""

from .environment import GAIN_WEIGHTS, SPARSE_WEIGHTS, EnvironmentReward
from .policy import LEGAL_WEIGHTS, PolicyReward

REWARDS: dict[str, PolicyReward | EnvironmentReward] = {
    "policy": PolicyReward(),
    "policy-best": PolicyReward("policy-best", {"is_best": 1.0}),
    "policy-legal": PolicyReward("policy-legal", LEGAL_WEIGHTS),
    "environment": EnvironmentReward(),
    "environment-sparse": EnvironmentReward("environment-sparse", SPARSE_WEIGHTS),
    "environment-gain": EnvironmentReward("environment-gain", GAIN_WEIGHTS),
}
"""By name. Each answers its own prompts and None for others, so several run side by side."""
