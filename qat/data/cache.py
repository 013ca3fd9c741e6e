"""A teacher cache on disk: manifest.json and shards, each written whole or not at all."""

import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_serializer,
    model_serializer,
    model_validator,
)

from qat.config import explain, fingerprint
from qat.data.config import CacheSettings
from qat.errors import CacheError
from qat.files import described, file_problem, import_command, inside, parse_json, whole_file

FORMAT = 3
MANIFEST = "manifest.json"
TEMPORARY = ".tmp"
SHARD = re.compile(r"(train|held_out)-[0-9]{5,9}\.safetensors")
"""File name of a shard as the builder writes it."""

Split = Literal["train", "held_out"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
SPLITS: tuple[Split, ...] = ("train", "held_out")
IMPORTED_AS = "unknown, imported as "
"""Prefix of a teacher's identity in an imported cache, where only its vocabulary is known; a
fingerprint follows."""
SERVED_AS = "unknown, served as "
"""Prefix of the identity of a teacher behind a server, whose weights cannot be hashed."""
MOST_WORDS = 2**31
"""Upper bound on a vocabulary size: token ids fit int32."""


MOST_NATS = 100.0
"""Upper bound on a token's surprise in nats, also where the teacher gives it probability 0."""
ROWS = "documents"
"""The current packing scheme (`Manifest.rows`)."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TeacherInfo(_Part):
    """The teacher's description in a cache's manifest."""

    name: str
    """Directory or hub id that the teacher was loaded from, or its model name on a server."""
    identity: Annotated[
        str,
        Field(
            pattern=rf"^([0-9a-f]{{32}}|[0-9a-f]{{40}}|({IMPORTED_AS}|{SERVED_AS})[0-9a-f]{{12}})$"
        ),
    ]
    """Content hash, or a hub's revision (`qat.models.load.model_identity`)."""
    vocab_size: int = Field(ge=1, le=MOST_WORDS)
    """Width of the teacher's logits."""
    max_positions: int | None
    """Longest sequence that the teacher can read; None if the architecture has no limit."""
    dtype: Literal["float64", "float32", "bfloat16", "float16", "unknown"]
    """Precision in which the teacher ran."""
    remote_code: bool = False
    """True if code that came with the teacher was run."""


class Shard(_Part):
    """The manifest entry of one shard file."""

    file: Annotated[str, Field(pattern=f"^{SHARD.pattern}$")]
    """File name in the manifest's directory."""
    split: Split
    sequences: int
    tokens: int = Field(ge=0)
    """Tokens that are not padding."""
    counted: int = Field(ge=0)
    """Positions where the loss mask is true."""
    bytes: int = Field(le=2**50)
    sha256: Sha256
    content: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """xxh3-64 of the tokens and document starts: a resumed build must find the same data."""
    surprise: float | None = Field(None, ge=0, allow_inf_nan=False)
    """Sum of the teacher's -log p(next token) over counted positions, in nats; None in imported
    caches and in caches older than this field."""
    source: str | None = None
    """Name of the source of all its text; None if the data has no names for its sources."""

    @model_serializer(mode="wrap")
    def _recorded(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        values = handler(self)
        return {key: value for key, value in values.items() if value is not None}

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        if not 0 < self.sequences <= self.bytes:
            raise ValueError(f"{self.sequences} sequences in {self.bytes} bytes ({self.file})")
        if self.counted > self.tokens:
            raise ValueError(f"{self.counted} of {self.tokens} tokens count ({self.file})")
        if not self.file.startswith(f"{self.split}-"):
            raise ValueError(f"{self.file} is in the split {self.split}")
        return self

    def path(self, directory: Path) -> Path:
        """Return the path of the file in a cache's directory."""
        return inside(directory, self.file, found_in=directory / MANIFEST, error=CacheError)


class Manifest(_Part):
    """The content of manifest.json: all that is needed to read a cache and to check it."""

    format: Literal[3] = FORMAT
    state: Literal["building", "complete"]
    fingerprint: Fingerprint
    """First 12 hex digits of a hash over settings, teacher and tokenizer."""
    settings: CacheSettings
    teacher: TeacherInfo
    tokenizer: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """`tokenizer_hash` of the tokenizer that made the tokens."""
    rows: Literal["documents", "stream"] = "stream"
    """Content of a sequence. `documents`: whole documents, or pieces of long ones that repeat
    earlier tokens of the document. `stream`: a stream of documents cut anywhere (caches older than
    this field)."""
    has_tail: bool = True
    """True if the teacher's mass outside the top K is known. False for imported caches, whose
    log-probabilities are normalised over the K tokens."""
    negatives: int = Field(0, ge=0)
    """Number of random tokens kept with their logits at every position but the last; only imports
    with `keep_negatives` have them."""
    shards: list[Shard] = Field(default_factory=list)

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        listed: set[str] = set()
        for shard in self.shards:
            if shard.file in listed:
                raise ValueError(f"{shard.file} is listed twice")
            listed.add(shard.file)
            room = shard.sequences * self.settings.sequence_length
            if shard.tokens > room:
                raise ValueError(f"{shard.tokens} tokens in {room} positions ({shard.file})")
        return self

    @field_serializer("settings")
    def _settings(self, settings: CacheSettings) -> dict[str, object]:
        return settings.recorded()

    @model_serializer(mode="wrap")
    def _recorded(self, handler: SerializerFunctionWrapHandler) -> dict[str, object]:
        values = handler(self)
        if self.rows == "stream":
            del values["rows"]
        return values

    def of_split(self, split: Split) -> list[Shard]:
        """Return the shards of one split, in order."""
        return [shard for shard in self.shards if shard.split == split]

    def total(self, field: Literal["sequences", "tokens", "counted", "bytes"]) -> int:
        """Return the sum of a field over all shards."""
        return sum(getattr(shard, field) for shard in self.shards)

    @property
    def teacher_ppl(self) -> float | None:
        """The teacher's perplexity on counted tokens; None if a shard has no `surprise`."""
        return _perplexity(self.shards)

    @property
    def held_out_ppl(self) -> float | None:
        """The teacher's perplexity on the held-out split, comparable to that of `qat eval`."""
        return _perplexity(self.of_split("held_out"))

    def to_bytes(self) -> bytes:
        """Return the file's bytes: JSON whose last field is the SHA-256 of everything else."""
        values = self.model_dump(mode="json")
        digest = hashlib.sha256(_json(values)).hexdigest()
        return _json({**values, "sha256": digest})


def _perplexity(shards: Sequence[Shard]) -> float | None:
    surprises = [shard.surprise for shard in shards]
    counted = sum(shard.counted for shard in shards)
    if None in surprises or not counted:
        return None
    return math.exp(min(sum(surprises) / counted, MOST_NATS))


def new_manifest(settings: CacheSettings, teacher: TeacherInfo, tokenizer: str) -> Manifest:
    """Return the manifest of a cache that has no shard yet."""
    identity = [settings.recorded(), teacher.identity, teacher.dtype, tokenizer, ROWS]
    return Manifest(
        state="building",
        fingerprint=fingerprint(identity),
        settings=settings,
        teacher=teacher,
        tokenizer=tokenizer,
        rows=ROWS,
    )


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a cache and check its hash.

    Raises:
        CacheError: the manifest is missing, foreign, damaged, or of an unknown format.
    """
    path = directory / MANIFEST
    theirs = None if path.is_file() else import_command(directory)
    if theirs is not None:
        raise CacheError(
            f"{directory} holds no {MANIFEST} but pickled tensors (.pt), expected a teacher cache; "
            f"if Anemll/qwen3_apple_style_2bit_qat_lora wrote it: {theirs}"
        )
    if not path.is_file():
        lacks = f" and holds no {MANIFEST}" if directory.is_dir() else ""
        raise CacheError(
            f"{directory} {described(directory)}{lacks}, expected a teacher cache; name another "
            "directory or build one with 'qat cache'"
        )
    return parse_manifest(path.read_bytes(), path)


def parse_manifest(raw: bytes, where: Path | str) -> Manifest:
    """Parse a manifest and check that it serializes to exactly these bytes.

    Raises:
        CacheError: the manifest is foreign, damaged, or of an unknown format.
    """
    manifest = _parse(raw, where)
    if raw != manifest.to_bytes():
        raise _damaged(where, "its hash does not fit its content")
    return manifest


def _parse(raw: bytes, path: Path | str) -> Manifest:
    try:
        values = parse_json(raw)
    except ValueError:
        raise _damaged(path, "it is not JSON") from None
    if not isinstance(values, dict) or not {"format", "shards"} <= values.keys():
        raise CacheError(
            f"{path} is not the manifest of a teacher cache (no format and shards); "
            "name a directory that 'qat cache' built"
        )
    if values["format"] != FORMAT:
        raise CacheError(
            f"{path} says format={values['format']!r}, this version reads format={FORMAT}; "
            "rebuild the cache or use the version that wrote it"
        )
    values.pop("sha256", None)
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        raise _damaged(path, explain(error)) from None


def _damaged(path: Path | str, what: str) -> CacheError:
    return CacheError(f"{path} is damaged: {what}; restore it or rebuild the cache")


def _json(values: object) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


def shard_problem(directory: Path, shard: Shard, *, deep: bool) -> str | None:
    """Return what is wrong with a shard file, or None; `deep` also checks its SHA-256."""
    return file_problem(shard.path(directory), shard.bytes, shard.sha256, deep=deep)


def raise_if_damaged(directory: Path, shard: Shard, *, deep: bool) -> None:
    """Raise an error if `shard_problem` finds one.

    Raises:
        CacheError: the shard is missing or damaged.
    """
    problem = shard_problem(directory, shard, deep=deep)
    if problem:
        raise CacheError(
            f"{shard.path(directory)}: {problem}; restore it, or delete it and run the same "
            "'qat cache' command again"
        )


def write_atomic(path: Path, content: bytes) -> None:
    """Write `content` to `path` atomically: a crash leaves either the old file or the new one.

    Raises:
        CacheError: the disk is full or the file cannot be written; no partial file remains.
    """
    try:
        with whole_file(path, path.with_name(path.name + TEMPORARY)) as file:
            file.write(content)
    except OSError as error:
        raise CacheError(
            f"cannot write {path} ({len(content)} bytes): {error.strerror}; finished shards are "
            "kept: make room and run the same command again"
        ) from error


def check_place(out: Path) -> None:
    """Refuse a directory to build in that holds something else than a cache or the start of one.

    Raises:
        CacheError: `out` is a file, or holds other files.
    """
    if out.exists() and not out.is_dir():
        raise CacheError(f"{out} is a file, expected a directory to build in; choose another --out")
    if out.is_dir() and not (out / MANIFEST).exists():
        if not all(map(is_temporary, out.iterdir())):
            raise CacheError(
                f"{out} {described(out)}, expected an empty directory or a teacher cache to go on "
                "with; choose another --out or empty it"
            )


def is_temporary(path: Path) -> bool:
    """Return whether the name is that of a file which a build was writing."""
    name = path.name.removesuffix(TEMPORARY)
    return path.suffix == TEMPORARY and (name == MANIFEST or SHARD.fullmatch(name) is not None)
