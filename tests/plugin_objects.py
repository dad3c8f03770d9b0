"""Plugins made of hooks."""

from collections.abc import Callable
from typing import Any

from specdec.hookspecs import hookimpl


def plugin_of(**hooks: Callable[..., Any]) -> Any:
    """A plugin with these hooks: functions whose first argument is the plugin."""
    return type("Plugin", (), {name: hookimpl(hook) for name, hook in hooks.items()})()
