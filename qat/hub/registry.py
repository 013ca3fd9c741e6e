"""The names that `qat hub pull` knows: those of the package, and a user's own on top."""

import difflib
import logging
import re
from pathlib import Path
from typing import Annotated, Literal

import tomli_w
from cyclopts import Parameter
from pydantic import Field, field_validator, model_validator

from qat.config import Required, Settings
from qat.errors import HubError
from qat.files import parse_toml
from qat.hub.files import atomic_file
from qat.secrets import scrubbed

logger = logging.getLogger(__name__)
SCHEMES = ("drive:", "gdrive:", "https://", "http://", "gs://", "hf:")
SHA256 = r"^[0-9a-f]{64}$"


class HubEntry(Settings):
    """A cache or a checkpoint and the places that hold it."""

    kind: Required[Literal["cache", "checkpoint"]]
    """What it is; says where it is put by default."""
    mirrors: Annotated[tuple[str, ...], Parameter(name="--mirror", negative=())] = Field(
        min_length=1
    )
    """Tried in order: drive:PATH (below --drive), gdrive:FILE_ID, https://, gs://, hf:owner/name[@revision], or a local path."""  # noqa: E501
    size: int | None = Field(default=None, gt=0)
    """Bytes of the archive that the mirrors hold; absent where nobody knows."""
    sha256: str | None = Field(default=None, pattern=SHA256)
    """Of the archive, 64 hex digits; absent where nobody knows."""
    tree_sha256: str | None = Field(default=None, pattern=SHA256)
    """Of the files inside, however they are packed: what `qat hub pack` prints."""
    note: str = ""
    """One line for `qat hub list`."""

    @field_validator("mirrors")
    @classmethod
    def _known(cls, mirrors: tuple[str, ...]) -> tuple[str, ...]:
        for mirror in mirrors:
            scheme = re.match(r"[a-z0-9]{2,}:", mirror)
            if not mirror or (scheme and not mirror.startswith(SCHEMES)):
                known = ", ".join(SCHEMES)
                raise ValueError(f"{mirror!r} starts with none of {known}, and is no path")
        return mirrors

    @model_validator(mode="after")
    def _plain_http_is_checked(self) -> "HubEntry":
        if self.sha256 is None and any(each.startswith("http://") for each in self.mirrors):
            raise ValueError(
                "sha256 is missing, and anybody can change what http:// sends; add it, or use "
                "https://"
            )
        return self


PACKAGED = Path(__file__).with_name("registry.toml")
REPOSITORY = PACKAGED.parents[2]
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

Registry = dict[str, HubEntry]


def user_file() -> Path:
    """Where a user's own entries are kept unless a flag says otherwise."""
    return Path.home() / ".config" / "qat" / "hub.toml"


def load_registry(own: Path) -> Registry:
    """All entries; those of the file `own`, if there is one, replace others of the same name.

    Local mirrors are relative to the repository in the packaged file, to its directory in `own`.

    Raises:
        HubError: `own` is not TOML.
        ConfigError: an entry has an unknown key, or a value that cannot be.
    """
    return _read(PACKAGED, REPOSITORY) | _read_own(own)


def find(registry: Registry, name: str) -> HubEntry:
    """The entry called `name`.

    Raises:
        HubError: there is none; the message has the nearest names.
    """
    if name in registry:
        return registry[name]
    folded = {each.casefold(): each for each in registry}
    near = difflib.get_close_matches(name.casefold(), folded, n=3, cutoff=0.4)
    hint = " or ".join(repr(folded[each]) for each in near) or ", ".join(sorted(registry))
    raise HubError(f"no entry is called {name!r}; did you mean {hint}? 'qat hub list' shows all")


def add_entry(own: Path, name: str, entry: HubEntry, *, replace: bool = False) -> None:
    """Write `entry` into the file `own`, whole or not at all; local mirrors become absolute.

    Raises:
        HubError: the name is taken (and `replace` is false) or cannot be a directory's name, or a
            mirror's address holds a password or token, which this file would keep.
    """
    for mirror in entry.mirrors:
        if scrubbed(mirror) != mirror:
            raise HubError(
                f"mirror {scrubbed(mirror)} holds a secret, which {own} would keep, expected an "
                "address without; log in with the tool of that place, or use another mirror"
            )
    if not NAME.fullmatch(name):
        raise HubError(
            f"name={name!r} must be letters, digits, '.', '_' or '-', as a directory is called so; "
            "choose another"
        )
    if name in load_registry(own) and not replace:
        raise HubError(f"{name!r} is in the registry already; choose another name, or add --force")
    _write(own, _read_own(own) | {name: _absolute(entry, Path.cwd())})


def learn_tree(own: Path, name: str, sha256: str | None, tree_sha256: str | None) -> bool:
    """Note in the file `own` the hash of the files that were just unpacked from an archive.

    Only for an entry that knows the archive's hash, that one, and none of the files: later the
    files are compared with it, and no receipt that lies beside them has to be believed. Whether it
    was noted; nothing is where the file cannot be written.
    """
    entries = _read_own(own)
    entry = entries.get(name)
    if entry is None or None in (sha256, tree_sha256) or entry.tree_sha256 is not None:
        return False
    if entry.sha256 != sha256:
        return False
    learned = entry.model_copy(update={"tree_sha256": tree_sha256})
    try:
        _write(own, entries | {name: learned})
    except HubError as error:
        logger.warning("the hash of the files of %s is not noted: %s", name, error)
        return False
    logger.info("%s: noted the hash of the files of %s, %s", own, name, tree_sha256)
    return True


def is_local(mirror: str) -> bool:
    """Whether a mirror is a path on this machine."""
    return not mirror.startswith(SCHEMES)


def _write(own: Path, entries: Registry) -> None:
    values = {
        each: entries[each].model_dump(mode="json", exclude_defaults=True) for each in entries
    }
    with atomic_file(own) as file:
        tomli_w.dump(values, file)


def _read_own(own: Path) -> Registry:
    return _read(own, own.parent) if own.exists() else {}


def _read(path: Path, base: Path) -> Registry:
    try:
        values = parse_toml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HubError(f"{path} is not TOML: {error}; mend that line") from None
    return {name: _absolute(_parse(path, name, values[name]), base) for name in values}


def _parse(path: Path, name: str, values: object) -> HubEntry:
    if not isinstance(values, dict) or not NAME.fullmatch(name):
        raise HubError(f"{path}: {name!r} must be a table such as [my_cache]; mend or remove it")
    return HubEntry.parse(values, f"{path}, [{name}]")


def _absolute(entry: HubEntry, base: Path) -> HubEntry:
    mirrors = (str(base / Path(m).expanduser()) if is_local(m) else m for m in entry.mirrors)
    return entry.model_copy(update={"mirrors": tuple(mirrors)})
