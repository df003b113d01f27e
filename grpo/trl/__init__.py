"""TRL's GRPO trainer, with as many rows on the device at once as fit: `from grpo.trl import GRPOTrainer`."""

from grpo.environment import set_library_defaults

set_library_defaults()  # as `grpo-lean trl` does; what is read when torch is loaded needs this import first

try:
    import trl as _trl
except ImportError as error:
    raise ImportError(
        "grpo.trl stands on TRL, which is not installed: pip install 'grpo-lean[trl]'"
    ) from error

OLDEST = 1, 10
"""TRL's version from which on metrics are means over tokens, and no loss one over padding: parts add up."""
if tuple(map(int, _trl.__version__.split(".")[:2])) < OLDEST:
    raise ImportError(
        f"grpo.trl needs TRL {OLDEST[0]}.{OLDEST[1]} or newer, and {_trl.__version__} is installed: "
        "pip install -U trl"
    )

from grpo.trl.trainer import GRPOTrainer  # noqa: E402

__all__ = ["GRPOTrainer"]
