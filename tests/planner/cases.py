"""Small configurations for the planner's tests."""

from dataclasses import replace
from typing import Any

from mula_titan import config_registry


def make_config(flavor: str = "mula_debug", **changes: Any) -> Any:
    """A configuration with values set by section__key; the registry function's defaults otherwise."""
    config = getattr(config_registry, flavor)()
    config.model.load_balance_per_layer = True
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return replace(config)
