"""The modules that need a library which not everybody has, imported on request."""

import importlib
import importlib.util
from types import ModuleType

from qat.errors import ConfigError


def load_peft() -> ModuleType:
    """Return the module of adapters.

    Raises:
        ConfigError: peft is not installed.
    """
    return _module("adapters", library="peft", extra="adapters")


def load_trl() -> ModuleType:
    """Return the module of trl's trainers.

    Raises:
        ConfigError: trl is not installed.
    """
    return _module("trl", library="trl", extra="trl")


def _module(name: str, *, library: str, extra: str) -> ModuleType:
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"the library {library} is not installed, expected it for qat.integrations.{library}; "
            f"run: pip install 'qat-distill[{extra}]'"
        )
    return importlib.import_module(f"qat.extensions.integrations.{name}")
