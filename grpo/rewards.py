"""The package `rewards` that stands beside this one, by a name that no file of a user's can take.

Python looks for `rewards` beside a person's script first, where a `rewards.py` of their own is the usual
name. So everything here asks for what it needs by `grpo.rewards`: the package itself where Python finds it by
its own name, and else another copy of it. Nothing is loaded before it is asked for.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rewards.analysis import Analysis
    from rewards.by_name import REWARDS
    from rewards.engine import (
        MATE_SCORE,
        PATIENCE_S,
        EngineError,
        EnginePool,
        UciEngines,
        find_stockfish,
        require_stockfish,
    )
    from rewards.environment import referee
    from rewards.formats import (
        CASTLING_ALIASES,
        MAX_HISTORY,
        as_move,
        canonical_uci,
        environment_prompt,
        is_fen,
        is_move,
        legal_move,
        parse_environment_completion,
        parse_policy_completion,
        policy_prompt,
    )
    from rewards.policy import TOP, PolicyReward, Position, ReferenceMoves, is_best
    from rewards.weighted import WeightedReward

__all__ = [
    "CASTLING_ALIASES",
    "MATE_SCORE",
    "MAX_HISTORY",
    "PATIENCE_S",
    "REWARDS",
    "TOP",
    "Analysis",
    "EngineError",
    "EnginePool",
    "PolicyReward",
    "Position",
    "ReferenceMoves",
    "UciEngines",
    "WeightedReward",
    "as_move",
    "canonical_uci",
    "environment_prompt",
    "find_stockfish",
    "is_best",
    "is_fen",
    "is_move",
    "legal_move",
    "parse_environment_completion",
    "parse_policy_completion",
    "policy_prompt",
    "referee",
    "require_stockfish",
]
_MODULES = {
    "REWARDS": "by_name",
    "Analysis": "analysis",
    "EngineError": "engine",
    "EnginePool": "engine",
    "MATE_SCORE": "engine",
    "PATIENCE_S": "engine",
    "UciEngines": "engine",
    "find_stockfish": "engine",
    "require_stockfish": "engine",
    "referee": "environment",
    "CASTLING_ALIASES": "formats",
    "MAX_HISTORY": "formats",
    "as_move": "formats",
    "environment_prompt": "formats",
    "is_fen": "formats",
    "is_move": "formats",
    "legal_move": "formats",
    "parse_environment_completion": "formats",
    "parse_policy_completion": "formats",
    "policy_prompt": "formats",
    "canonical_uci": "formats",
    "PolicyReward": "policy",
    "Position": "policy",
    "TOP": "policy",
    "ReferenceMoves": "policy",
    "is_best": "policy",
    "WeightedReward": "weighted",
}
"""In which module of the package each name is."""
_FOLDER = Path(__file__).resolve().parents[1] / "rewards"
__path__ = [str(_FOLDER)]


def _package() -> str:
    """The name by which the package is imported: its own, unless that is somebody else's."""
    loaded = sys.modules.get("rewards")
    spec = loaded.__spec__ if loaded is not None else find_spec("rewards")
    is_ours = spec is not None and spec.origin is not None and Path(spec.origin).resolve().parent == _FOLDER
    return "rewards" if is_ours else "grpo.rewards"


_PACKAGE = _package()


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{_PACKAGE}.{_MODULES[name]}"), name)
