"""A run's settings, and how they are read from YAML and the command line."""

from grpo.config.limits import SettingsError
from grpo.config.reading import CONFIG_FILE, from_plain, parse_command_line, read_yaml, to_plain, write_yaml
from grpo.config.settings import Config

__all__ = [
    "CONFIG_FILE",
    "Config",
    "SettingsError",
    "from_plain",
    "parse_command_line",
    "read_yaml",
    "to_plain",
    "write_yaml",
]
