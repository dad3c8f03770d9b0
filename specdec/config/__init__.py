"""The configuration: its values, one TOML file plus overrides, and strict structuring with errors that name the key."""

from specdec.config.loading import Override, load_config, read_toml
from specdec.config.structuring import structure_choice, structure_options
from specdec.config.validators import FieldError, between, one_of
from specdec.config.values import PLUGIN_TABLES, Choice, GenerationConfig, RunConfig, TargetConfig

__all__ = [
    "PLUGIN_TABLES",
    "Choice",
    "FieldError",
    "GenerationConfig",
    "Override",
    "RunConfig",
    "TargetConfig",
    "between",
    "load_config",
    "one_of",
    "read_toml",
    "structure_choice",
    "structure_options",
]
