"""The names that `qat hub pull` knows, and receipts of what it brought.

Names are those of the package, and a user's own on top.
"""

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import tomli_w
from cyclopts import Parameter
from pydantic import Field, ValidationError, field_validator, model_validator

from qat.config import Required, Settings, explain
from qat.errors import HubError, nearest
from qat.files import parse_toml
from qat.hub.files import RECEIPT, atomic_file, sha256_files, sha256_tree, tree_of
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
    near = " or ".join(map(repr, nearest(name, registry, 3)))
    hint = f"did you mean {near}?" if near else f"there are {', '.join(sorted(registry))};"
    raise HubError(f"no entry is called {name!r}; {hint} 'qat hub list' shows all")


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


# A receipt says from where a directory was brought, and the hash of every file. Nothing that comes
# from elsewhere brings one along: archives that hold one are refused, and of directories it is
# left out. But tar, git or rsync bring any file: who hands over a directory may have written its
# receipt too. So a receipt tells what was brought, and what is verified has the hash that the
# registry knows.

Sha256 = Annotated[str, Field(pattern=SHA256)]
MEND = "replace it with --force"
ASK = "ask who registered it"
UNKNOWN = (
    "no hash of it is registered, so nothing proves that this is what was meant: ask whoever made "
    "it for the SHA-256"
)
UNPROVEN = (
    "its files are unchanged since it was brought, says a receipt that anybody could have written, "
    "and no hash of the files is registered"
)


class Receipt(Settings):
    """Where the files of a directory came from, and what they were then."""

    name: str | None
    """In the registry; None for what `qat hub unpack` unpacked."""
    mirror: str
    """Its address, or the archive."""
    sha256: Sha256 | None
    """Of the archive; None if a directory was copied."""
    files: dict[str, Sha256]

    @property
    def tree_sha256(self) -> str:
        """SHA-256 over all files, computed as `sha256_tree` does."""
        return tree_of(self.files)


def leave_receipt(root: Path, name: str | None, mirror: str, sha256: str | None) -> Receipt:
    """Write the receipt of the files in `root`, and give it back."""
    receipt = Receipt(name=name, mirror=scrubbed(mirror), sha256=sha256, files=sha256_files(root))
    (root / RECEIPT).write_text(receipt.model_dump_json(indent=1), encoding="utf-8")
    return receipt


def read_receipt(directory: Path) -> Receipt | None:
    """The receipt in a directory; None if there is none.

    Raises:
        HubError: it is damaged.
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
    """Read every byte in a directory and compare it with the receipt; files that it does not name.

    Raises:
        HubError: files are missing or not what they were.
    """
    now = sha256_files(directory)
    wrong = [name for name, sha256 in receipt.files.items() if now.get(name) != sha256]
    if wrong:
        what = "differs from its SHA-256" if wrong[0] in now else "is missing"
        more = f" ({len(wrong)} files in all)" if len(wrong) > 1 else ""
        raise HubError(
            f"{directory}: {wrong[0]} {what}{more}, expected what came from {receipt.mirror}; "
            f"{MEND}"
        )
    return extra_files(directory, receipt.files)


class Verified(NamedTuple):
    """What `verify` found."""

    name: str | None
    mirror: str
    files: int
    sha256: str | None
    tree_sha256: str
    is_verified: bool
    """The registry knows the hash of the files of this name, and it is equal."""


def verify(directory: Path, registry: Mapping[str, HubEntry]) -> Verified:
    """Compare every byte in `directory` with its receipt, and that with the registry.

    Raises:
        HubError: there is no receipt, or anything differs; also a file that was not brought.
    """
    if not directory.is_dir():
        raise HubError(f"{directory} is no directory, expected what 'qat hub' brought")
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
        told = UNKNOWN if entry is None else f"'qat hub pull {receipt.name} --force' compares anew"
        logger.warning("%s (%s): %s; %s", where, receipt.mirror, UNPROVEN, told)
    return Verified(
        receipt.name, receipt.mirror, len(receipt.files), receipt.sha256, tree, is_verified
    )


def extra_files(directory: Path, names: Collection[str]) -> list[str]:
    """What lies in a directory beside `names` and its receipt; also what is never packed."""
    files = (path for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())
    found = (path.relative_to(directory).as_posix() for path in files)
    return sorted(name for name in found if name not in names and name != RECEIPT)


def is_registered(
    entry: HubEntry, sha256: str | None, tree_sha256: str, *, where: str, mend: str
) -> bool:
    """Whether the hash of the files is registered; that of their archive proves nothing of them,
    but where it was just unpacked.

    Raises:
        HubError: one was registered and is another; `where` and `mend` are for the message.
    """
    pairs = ((" of the files", tree_sha256, entry.tree_sha256), ("", sha256, entry.sha256))
    for of, found, registered in pairs:
        if None not in (found, registered) and found != registered:
            raise HubError(f"{where}: SHA-256{of} is {found}, registered is {registered}; {mend}")
    return tree_sha256 == entry.tree_sha256
