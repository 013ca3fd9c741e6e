"""What the registry knows of one name."""

import re
from typing import Annotated, Literal

from cyclopts import Parameter
from pydantic import Field, field_validator, model_validator

from qat.config import Required, Settings

SCHEMES = ("drive:", "gdrive:", "https://", "http://", "gs://", "hf:")
SHA256 = r"^[0-9a-f]{64}$"


class Entry(Settings):
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
    def _plain_http_is_checked(self) -> "Entry":
        if self.sha256 is None and any(each.startswith("http://") for each in self.mirrors):
            raise ValueError(
                "sha256 is missing, and anybody can change what http:// sends; add it, or use "
                "https://"
            )
        return self
