"""Typed settings: frozen, strict, and with a fingerprint.

A verb has one `Settings` class; its fields are its flags and the keys of its table in a recipe.
"""

import json
from pathlib import Path
from typing import Any, Self

import xxhash
from pydantic import BaseModel, ConfigDict, ValidationError

from qat.errors import ConfigError


class Settings(BaseModel):
    """Base of every typed configuration: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def parse(cls, values: dict[str, Any], where: str) -> Self:
        """Checked settings from plain `values`; `where` names their source in the message.

        Raises:
            ConfigError: an unknown key, a missing one, or a value out of range.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{where}: {explain(error)}") from None

    def fingerprint(self) -> str:
        """12 hex digits that change exactly when a field does."""
        return fingerprint(self.model_dump(mode="json"))


class DeviceSettings(Settings):
    """Where a verb computes."""

    device: str = "auto"
    """auto, cpu, cuda, cuda:1, mps, xla or tpu."""
    xla_cache_dir: Path | None = None
    """With --device xla: keep what is compiled in this directory, for later processes."""


def fingerprint(values: object) -> str:
    """12 hex digits of the canonical JSON of `values`: xxh3-64 over sorted keys."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(canonical.encode())[:12]


def explain(error: ValidationError) -> str:
    """A pydantic error as one line: `field=value: what is wrong`, joined by semicolons."""
    parts = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if not name:  # a rule about several fields names them itself
            parts.append(message)
            continue
        value = "" if item["type"] in {"missing", "extra_forbidden"} else f"={item['input']!r}"
        parts.append(f"{name}{value}: {message}")
    return "; ".join(parts)
