"""The registry of names for `qat hub pull`, and receipts of fetched directories.

The registry consists of the package's entries and the user's own, which take precedence.
"""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tomli_w
from cyclopts import Parameter
from pydantic import Field, ValidationError, field_validator, model_validator

from qat.config import Required, Settings, explain, read_toml
from qat.errors import HubError, nearest
from qat.files import described
from qat.hub.files import RECEIPT, atomic_file, sha256_files, sha256_tree, tree_of
from qat.secrets import scrubbed

logger = logging.getLogger(__name__)
SCHEMES = ("drive:", "gdrive:", "https://", "http://", "gs://", "hf:")
SHA256 = r"^[0-9a-f]{64}$"


class HubEntry(Settings):
    """A cache or a checkpoint, and the places that hold it."""

    kind: Required[Literal["cache", "checkpoint"]]
    """Kind of the entry; decides the default directory."""
    mirrors: Annotated[tuple[str, ...], Parameter(name="--mirror", negative=())] = Field(
        min_length=1
    )
    """Mirrors, tried in order: drive:PATH (below --drive), gdrive:FILE_ID, https://, gs://,
    hf://owner/name[@revision], or a local path."""
    size: int | None = Field(default=None, gt=0)
    """Size of the archive in bytes, if known."""
    sha256: str | None = Field(default=None, pattern=SHA256)
    """SHA-256 of the archive, 64 hex digits, if known."""
    tree_sha256: str | None = Field(default=None, pattern=SHA256)
    """SHA-256 of the files inside, independent of the archive format, as `qat hub pack` prints
    it."""
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
    """Return the default file of a user's own entries."""
    return Path.home() / ".config" / "qat" / "hub.toml"


def load_registry(own: Path) -> Registry:
    """Return all entries; those of the file `own`, if it exists, override entries of the same name.

    Local mirrors are relative to the repository in the packaged file, to its directory in `own`.

    Raises:
        HubError: an entry is no table, or its name is no valid directory name.
        ConfigError: `own` is not TOML, or an entry has an unknown key or an invalid value.
    """
    return _read(PACKAGED, REPOSITORY) | _read_own(own)


def find(registry: Registry, name: str) -> HubEntry:
    """Return the entry called `name`.

    Raises:
        HubError: no such entry; the message lists the nearest names.
    """
    if name in registry:
        return registry[name]
    near = " or ".join(map(repr, nearest(name, registry, 3)))
    hint = f"did you mean {near}?" if near else f"there are {', '.join(sorted(registry))};"
    raise HubError(f"no entry is called {name!r}; {hint} 'qat hub list' shows all")


def add_entry(own: Path, name: str, entry: HubEntry, *, replace: bool = False) -> None:
    """Add `entry` to the file `own`, written atomically; local mirrors become absolute paths.

    Raises:
        HubError: the name is taken and `replace` is false, or it is no valid directory name, or a
            mirror's address holds a password or token, which this file would store.
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
    """Record the hash of unpacked files in the file `own`; return whether it was recorded.

    Only an entry with this archive's hash and without a hash of the files is updated. Later checks
    then compare the files with the registry instead of trusting a receipt. Nothing is recorded if
    the file cannot be written.
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
    """Return whether a mirror is a local path."""
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
    values = read_toml(path, str(path), "tables such as [my_cache]")
    return {name: _absolute(_parse(path, name, values[name]), base) for name in values}


def _parse(path: Path, name: str, values: object) -> HubEntry:
    if not isinstance(values, dict) or not NAME.fullmatch(name):
        raise HubError(f"{path}: {name!r} must be a table such as [my_cache]; mend or remove it")
    return HubEntry.parse(values, f"{path}, [{name}]")


def _absolute(entry: HubEntry, base: Path) -> HubEntry:
    mirrors = (str(base / Path(m).expanduser()) if is_local(m) else m for m in entry.mirrors)
    return entry.model_copy(update={"mirrors": tuple(mirrors)})


# A receipt records the origin of a directory and the hash of every file. Downloads never contain
# one: archives with a receipt are refused, and it is skipped when a directory is copied. But tar,
# git or rsync copy any file, so whoever provides a directory may have forged its receipt. A receipt
# therefore only detects changes; verification compares with the hash in the registry.

Sha256 = Annotated[str, Field(pattern=SHA256)]
REPLACE = "replace it with --force"
ASK = "ask who registered it"
NO_HASH = (
    "no hash of it is registered, so nothing proves that this is what was meant: ask whoever made "
    "it for the SHA-256"
)
UNPROVEN = (
    "its files are unchanged since it was brought, says a receipt that anybody could have written, "
    "and no hash of the files is registered"
)


class Receipt(Settings):
    """The origin of a directory's files, and their hashes when they were fetched."""

    name: str | None
    """Name in the registry; None for files from `qat hub unpack`."""
    mirror: str
    """Address of the mirror, or path of the archive."""
    sha256: Sha256 | None
    """SHA-256 of the archive; None if a directory was copied."""
    files: dict[str, Sha256]

    @property
    def tree_sha256(self) -> str:
        """SHA-256 over all files, equal to `sha256_tree`."""
        return tree_of(self.files)


def write_receipt(root: Path, name: str | None, mirror: str, sha256: str | None) -> Receipt:
    """Write the receipt of the files in `root` and return it."""
    receipt = Receipt(name=name, mirror=scrubbed(mirror), sha256=sha256, files=sha256_files(root))
    (root / RECEIPT).write_text(receipt.model_dump_json(indent=1), encoding="utf-8")
    return receipt


def read_receipt(directory: Path) -> Receipt | None:
    """Return the receipt in a directory, or None if there is none.

    Raises:
        HubError: the receipt is damaged.
    """
    path = directory / RECEIPT
    if not path.is_file():
        return None
    try:
        return Receipt.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise HubError(
            f"{path} is damaged ({explain(error)}), expected what 'qat hub' wrote; remove the "
            "directory and fetch it again, or choose another --out"
        ) from None


def examine(directory: Path, receipt: Receipt) -> list[str]:
    """Compare every file of a directory with the receipt; return files that are not in it.

    Raises:
        HubError: files are missing or changed.
    """
    now = sha256_files(directory)
    wrong = [name for name, sha256 in receipt.files.items() if now.get(name) != sha256]
    if wrong:
        what = "differs from its SHA-256" if wrong[0] in now else "is missing"
        more = f" ({len(wrong)} files in all)" if len(wrong) > 1 else ""
        raise HubError(
            f"{directory}: {wrong[0]} {what}{more}, expected what came from {receipt.mirror}; "
            f"{REPLACE}"
        )
    return extra_files(directory, receipt.files)


class Verified(NamedTuple):
    """The result of `verify`."""

    name: str | None
    mirror: str
    files: int
    sha256: str | None
    tree_sha256: str
    is_verified: bool
    """True if the registry has a hash of this name's files, and it matches."""


def verify(directory: Path, registry: Mapping[str, HubEntry]) -> Verified:
    """Compare every byte in `directory` with its receipt, and the receipt with the registry.

    Raises:
        HubError: there is no receipt, a file differs, or there are extra files.
    """
    if not directory.is_dir():
        raise HubError(
            f"{directory} {described(directory)}, expected a directory that 'qat hub' brought; "
            "check the path"
        )
    receipt = read_receipt(directory)
    if receipt is None:
        raise HubError(
            f"{directory} holds no {RECEIPT}, expected what 'qat hub pull' or 'unpack' brought; "
            f"SHA-256 of its files is {sha256_tree(directory)}: compare that yourself"
        )
    if extra := examine(directory, receipt):
        raise HubError(
            f"{directory} holds {len(extra)} files that did not come from {receipt.mirror} "
            f"({extra[0]}), expected none; move them away if you know them"
        )
    entry = None if receipt.name is None else registry.get(receipt.name)
    where, tree = str(directory), receipt.tree_sha256
    is_verified = entry is not None and is_registered(
        entry, receipt.sha256, tree, where=where, mend=f"pull it again, or {ASK}"
    )
    if not is_verified:
        hint = NO_HASH if entry is None else f"'qat hub pull {receipt.name} --force' compares anew"
        logger.warning("%s (%s): %s; %s", where, receipt.mirror, UNPROVEN, hint)
    return Verified(
        receipt.name, receipt.mirror, len(receipt.files), receipt.sha256, tree, is_verified
    )


def extra_files(directory: Path, names: Collection[str]) -> list[str]:
    """Return paths in a directory that are neither in `names` nor its receipt.

    They include files that are never packed.
    """
    files = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    found = (path.relative_to(directory).as_posix() for path in files)
    return sorted(name for name in found if name not in names and name != RECEIPT)


def is_registered(
    entry: HubEntry, sha256: str | None, tree_sha256: str, *, where: str, mend: str
) -> bool:
    """Return whether the registered hash of the files matches.

    The archive's hash proves nothing about files on disk, except right after unpacking.

    Raises:
        HubError: a registered hash differs; `where` and `mend` are for the message.
    """
    pairs = ((" of the files", tree_sha256, entry.tree_sha256), ("", sha256, entry.sha256))
    for of, found, registered in pairs:
        if None not in (found, registered) and found != registered:
            raise HubError(f"{where}: SHA-256{of} is {found}, registered is {registered}; {mend}")
    return tree_sha256 == entry.tree_sha256
