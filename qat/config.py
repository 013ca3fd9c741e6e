"""Typed settings: frozen, strict, with a fingerprint, and with headings for the help.

A verb has one `Settings` class; its fields are its flags and the keys of its table in a recipe.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self, TypeVar

import xxhash
from cyclopts import Group, Parameter
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator

from qat.errors import ConfigError, nearest
from qat.files import parse_toml
from qat.hooks import hooks

T = TypeVar("T")


def _below(heading: str) -> Parameter:
    return Parameter(group=Group.create_ordered(heading))


# Headings of a verb's help, in order: `lr: Rates[float]` is listed below "Learning rates".
Required = Annotated[T, _below("Required")]
Formats = Annotated[T, _below("Formats")]
Calibration = Annotated[T, _below("Calibration")]
Attention = Annotated[T, _below("Attention")]
Text = Annotated[T, _below("Text")]
Kept = Annotated[T, _below("Targets kept from the teacher")]
Served = Annotated[T, _below("A teacher on a server")]
Learns = Annotated[T, _below("What learns")]
Loss = Annotated[T, _below("Loss and teacher")]
Judged = Annotated[T, _below("Evaluation")]
HowMuch = Annotated[T, _below("Amount of evaluation")]
Sampling = Annotated[T, _below("Sampling")]
Steps = Annotated[T, _below("Steps and batches")]
Rates = Annotated[T, _below("Learning rates")]
Measured = Annotated[T, _below("What is measured")]
Speed = Annotated[T, _below("Speed and memory")]
Saving = Annotated[T, _below("Evaluations, checkpoints and logs")]
Trackers = Annotated[T, _below("Trackers and uploads")]
Careful = Annotated[T, _below("Resuming and checks")]
RUNS_CODE = {"--trust-remote-code", "--tasks-dir", "--allow-command", "--allow-code-execution"}
"""Flags that run third-party code: that of a model or a task, a program of a sweep or an answer."""


class OnResume(NamedTuple):
    """Annotation of a setting of a run: whether the run may be resumed with another value."""

    fixed_because: str | None
    """Reason why not; None if it may change."""


Free = Annotated[T, OnResume(None)]


class Knows(NamedTuple):
    """Annotation of a text setting with well-known values, which messages suggest."""

    names: tuple[str, ...]


MOST = 2**63 - 1
"""The largest integer of any setting, that of an int64."""


class Settings(BaseModel):
    """Base of all typed configurations: immutable, with finite numbers, without unknown keys."""

    # build validators on first use: all would take a tenth of the time of `qat train --help`
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, defer_build=True)

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for name in type(self).model_fields:
            value = getattr(self, name)
            if isinstance(value, int) and abs(value) > MOST:
                raise ValueError(f"{name}={value}, expected a number of at most {MOST}")
        return self

    @classmethod
    def parse(cls, values: dict[str, Any], where: str) -> Self:
        """Return checked settings from plain `values`; `where` names their source in the message.

        Raises:
            ConfigError: an unknown key, a missing one, or a value out of range.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ConfigError(f"{where}: {explain(error, cls.model_fields)}") from None

    def fingerprint(self) -> str:
        """Return 12 hex digits that change exactly when a field does."""
        return fingerprint(self.model_dump(mode="json"))


def _known_device(device: str) -> str:
    kind, _, index = device.partition(":")
    is_known = kind in DEVICES or kind in hooks("qat.devices")
    if not is_known or not (index or "0").isdecimal() or device.endswith(":"):
        found = ["cuda"] if kind.lower() == "gpu" else nearest(kind, DEVICES)
        hint = f"; did you mean {found[0]}?" if found else ""
        raise ConfigError(
            f"device={device} is unknown; use auto, cpu, cuda, cuda:N, mps or xla{hint}"
        )
    return device


DEVICES = ("auto", "cpu", "cuda", "mps", "xla")
Device = Annotated[str, AfterValidator(_known_device), Knows(DEVICES)]
"""Name of a device; torch checks later if it is available."""


class DeviceSettings(Settings):
    """Settings of the device that a verb computes on."""

    device: Speed[Free[Device]] = "auto"
    """auto, cpu, cuda, cuda:1, mps or xla."""
    xla_cache_dir: Speed[Free[Path | None]] = None
    """With --device xla: cache compiled programs in this directory, for later processes."""


def refuse_code(values: object, where: str) -> None:
    """Refuse content of the file `where` that would run third-party code, at any depth.

    Only the user may enable that, on the command line, because a file may come from anyone.

    Raises:
        ConfigError: a key that runs code has another value than false.
    """
    if isinstance(values, dict):
        for key, value in values.items():
            flag = f"--{key.replace('_', '-')}"
            if flag in RUNS_CODE and value is not False:
                raise ConfigError(
                    f"{where} has {key} = {value!r}, which runs code of others, expected no such "
                    f"key in a file; drop it, and if you trust that code type {flag} yourself"
                )
            refuse_code(value, where)
    elif isinstance(values, list):
        for value in values:
            refuse_code(value, where)


def read_toml(
    path: Path, found: str, expected: str, mend: str = "mend that line"
) -> dict[str, Any]:
    """Read the tables of a TOML file.

    Args:
        path: the file.
        found: how the message names it: `recipe=mine.toml`.
        expected: what the file should hold, for the message.
        mend: what to do about a file that is not TOML, for the message.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or would run third-party code.
    """
    try:
        values = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{found}: {error.strerror}; expected a TOML file; check the path"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{found} is not TOML ({error}), expected {expected}; {mend}") from None
    refuse_code(values, str(path))
    return values


def fingerprint(values: object) -> str:
    """Return 12 hex digits of the canonical JSON of `values`: xxh3-64 over sorted keys."""
    canonical = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(canonical.encode())[:12]


def meant(name: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown `name`: the nearest of `known`, or all."""
    found = nearest(name, known)
    return f"did you mean {found[0]!r}?" if found else f"known are {', '.join(sorted(known))}"


def explain(error: ValidationError, known: Iterable[str] = ()) -> str:
    """Return a pydantic error as one line: `field=value: what is wrong`, joined by semicolons.

    For an unknown key the line suggests the nearest of the `known` ones.
    """
    parts = []
    for item in error.errors():
        if item["type"] == "default_factory_not_called":  # follows from another mistake
            continue
        name = ".".join(str(part) for part in item["loc"])
        message = item["msg"].removeprefix("Value error, ")
        if not name:  # a rule about several fields names them itself
            parts.append(message)
            continue
        if item["type"] == "extra_forbidden" and known and len(item["loc"]) == 1:
            parts.append(f"{name} is unknown; {meant(name, known)}")
            continue
        if item["type"] == "literal_error":
            choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
            found = nearest(str(item["input"]), choices)
            message += f"; did you mean {found[0]!r}?" if found else ""
        value = "" if item["type"] in {"missing", "extra_forbidden"} else f"={item['input']!r:.200}"
        parts.append(f"{name}{value}: {message}")
    return "; ".join(parts)
