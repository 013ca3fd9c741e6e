"""What `qat hub` leaves in a directory that it brought: from where, and the hash of every file.

Nothing that comes from elsewhere brings one along: archives that hold one are refused, and of
directories it is left out. But tar, git or rsync bring any file: who hands over a directory may
have written its receipt too. So a receipt tells what was brought, and what is verified has the hash
that the registry knows.
"""

import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from qat.config import Settings, explain
from qat.errors import HubError
from qat.hub.files import RECEIPT, sha256_files, sha256_tree, tree_of
from qat.hub.registry import SHA256, HubEntry
from qat.secrets import scrubbed

logger = logging.getLogger(__name__)

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
