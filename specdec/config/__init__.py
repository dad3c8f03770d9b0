"""The configuration: its classes, loading from TOML and overrides, and strict validation that names the wrong key."""

from specdec.checking import FieldError, between, one_of
from specdec.config.loading import Override, layered, load_config, read_toml, structure_options
from specdec.config.values import PLUGIN_TABLES, Choice, GenerationConfig, GenerationSettings, RunConfig, TargetConfig

__all__ = [
    "PLUGIN_TABLES",
    "Choice",
    "FieldError",
    "GenerationConfig",
    "GenerationSettings",
    "Override",
    "RunConfig",
    "TargetConfig",
    "between",
    "layered",
    "load_config",
    "one_of",
    "read_toml",
    "structure_options",
]
