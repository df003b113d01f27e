"""Rewards for RookWorld texts: text in, numbers out. A tower of its own: no torch, no `grpo`.

rewards = REWARDS["policy"].with_engine(EnginePool())
rewards(prompts=[...], completions=[...], fen=[...])      # TRL's calling convention
rewards.components(prompts, completions, fen=[...])       # the same by component, for logging
"""

from .by_name import REWARDS

__all__ = ["REWARDS"]
