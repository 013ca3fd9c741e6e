"""Settings of `qat cache`: what decides a cache's content, and where the teacher runs."""

from pathlib import Path
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, field_validator, model_validator

from qat.config import DeviceSettings, Kept, Required, Served, Settings, Speed, Text
from qat.errors import ConfigError

DataFormat = Literal["auto", "plain", "alpaca", "pairs", "messages", "sharegpt"]
Thinking = Literal["false", "true", "both", "none", "all"]
Targets = Literal["assistant", "all"]
AnyTargets = Literal["auto", "assistant", "all"]


Location = Annotated[
    str, BeforeValidator(lambda value: str(value) if isinstance(value, Path) else value)
]
"""A directory, or an address such as s3://bucket/name."""


def chosen_targets(targets: AnyTargets, data_format: DataFormat, data: str) -> Targets:
    """Resolve `auto`: decide which tokens count in data that was read as `data_format`.

    Raises:
        ConfigError: `targets=assistant` for plain text, which has no turns.
    """
    if data_format == "plain" and targets == "assistant":
        raise ConfigError(
            f"targets=assistant, but {data} is plain text, expected chats; drop --targets"
        )
    if targets == "auto":
        return "all" if data_format == "plain" else "assistant"
    return targets


class CacheSettings(Settings):
    """All settings that decide a cache's bytes, apart from the teacher and the tokenizer."""

    data: Required[str]
    """File (.txt, .md, .jsonl, .json, .csv, .tsv, .parquet; also .gz), directory of such files,
    `stdlib`, or datasets id[:config][@split]; or several with shares: FILE:1,FILE:3."""
    format: Text[DataFormat] = "auto"
    """Format of a row; `auto` looks at the fields of the first row."""
    text_field: Text[str] = "text"
    """Field of a `plain` row that holds the text."""
    thinking: Text[Thinking] = "false"
    """Chat rendering: thinking off (false), on (true), both, no chat template (none), or all
    three."""
    targets: Text[Targets] = "all"
    """Tokens that count in the loss: those of assistants with the end of their turn, or all."""
    sequence_length: Text[int] = Field(ge=2)
    """Tokens in a packed sequence."""
    top_k: Kept[int] = Field(64, ge=0)
    """Number of most likely teacher tokens kept at every position; 0 keeps none."""
    draws: Kept[int] = Field(0, ge=0)
    """Number of systematic draws kept at every position (random-sampling distillation)."""
    num_sequences: Text[int] = Field(0, ge=0)
    """Number of training sequences to build; 0 uses all data."""
    held_out: Text[float] = Field(0.05, ge=0, lt=1)
    """Fraction of the documents held out for evaluation."""
    shard_size: Speed[int] = Field(1024, ge=1)
    """Sequences per shard; an interrupted build resumes after the last whole shard."""
    seed: Text[int] = Field(0, ge=0)
    """Seed of the held-out split and of the draws."""

    @model_validator(mode="after")
    def _keeps_something(self) -> Self:
        if self.top_k == 0 and self.draws == 0:
            raise ConfigError(
                "top_k=0 and draws=0 keep nothing of the teacher; at least one must be positive: "
                "set --top-k or --draws"
            )
        return self

    def recorded(self) -> dict[str, object]:
        """Return the settings as manifests record them.

        `targets` is omitted when all tokens count, as in caches older than this setting.
        """
        return self.model_dump(mode="json", exclude={"targets"} if self.targets == "all" else None)


class CacheConfig(CacheSettings, DeviceSettings):
    """Flags of `qat cache`."""

    targets: Text[AnyTargets] = "auto"
    """Tokens that count in the loss: those of assistants with the end of their turn, or all; auto
    is assistant for chats and all for plain text."""

    sequence_length: Text[int | None] = Field(None, ge=2)
    """Tokens in a packed sequence; by default long enough for 95 % of the documents, but at most
    1,024 for chats and 256 for plain text."""

    teacher: Required[str]
    """Directory or hub id of the teacher, which also provides the tokenizer; or the address of a
    server that runs it, http://HOST/v1 (vLLM, SGLang, llama.cpp)."""
    teacher_model: Served[str | None] = None
    """Name of the teacher on its server."""
    tokenizer: Served[str | None] = None
    """Directory or hub id with the tokenizer and config.json of a teacher behind a server; default:
    --teacher-model."""
    dtype: Speed[Literal["auto", "fp32", "bf16", "fp16"]] = "auto"
    """The teacher's precision; auto is bf16 where it is native, fp16 on other GPUs, else fp32."""
    batch_size: Speed[int] = Field(0, ge=0)
    """Maximum number of sequences in one teacher forward, or in flight to a server; 0 takes as many
    as keep the device busy, or 32 for a server."""
    device_map: Speed[Literal["auto", "disk"] | None] = None
    """Spread the teacher over the devices (`auto`), or keep it on disk and load each layer once per
    shard (`disk`); by default it is loaded on one device."""
    trust_remote_code: Speed[bool] = False
    """Run the code that comes with the teacher (recorded in the manifest of the cache)."""

    @field_validator("teacher")
    @classmethod
    def _has_a_form(cls, teacher: str) -> str:
        address = teacher.rstrip("/")
        if not address.startswith(("http://", "https://")):
            return teacher
        try:
            is_one = bool(urlsplit(address).hostname) and urlsplit(address).port != 0
        except ValueError:
            is_one = False
        if set("@?#") & set(address) or not is_one:
            # not repeated: it may hold a password
            raise ConfigError(
                "teacher is no address such as http://HOST:8000/v1, expected one without a user, a "
                "password or a question; put the server's key into QAT_TEACHER_API_KEY"
            )
        return address

    @model_validator(mode="after")
    def _fits_its_server(self) -> Self:
        named = {"teacher_model": self.teacher_model, "tokenizer": self.tokenizer}
        if not self.is_served:
            for name, value in named.items():
                if value is not None:
                    raise ConfigError(
                        f"{name}={value} says what a server has, but teacher={self.teacher} is no "
                        f"address; drop --{name.replace('_', '-')}, or give http://HOST/v1"
                    )
            return self
        if self.teacher_model is None:
            raise ConfigError(
                f"teacher={self.teacher} is a server, expected the name that it has for the "
                "teacher; set --teacher-model"
            )
        if self.draws:
            raise ConfigError(
                f"draws={self.draws}, but a server gives its likeliest tokens alone, and draws "
                "among those would never be another; drop --draws, and set --top-k"
            )
        for name in ("dtype", "device_map"):
            if name in self.model_fields_set:
                raise ConfigError(
                    f"{name}={getattr(self, name)}, but who started {self.teacher} decided how it "
                    f"computes; drop --{name.replace('_', '-')}"
                )
        return self

    @property
    def is_served(self) -> bool:
        """True if the teacher runs behind a server."""
        return self.teacher.startswith(("http://", "https://"))

    @property
    def described_by(self) -> str:
        """Directory or hub id with the teacher's tokenizer and config.json."""
        return (self.tokenizer or self.teacher_model or "") if self.is_served else self.teacher

    def settings(self, data_format: DataFormat) -> CacheSettings:
        """Return the settings that decide the content, for data that was read as `data_format`.

        Raises:
            ConfigError: `targets=assistant` for plain text, which has no turns.
        """
        targets = chosen_targets(self.targets, data_format, f"data={self.data}")
        values = {name: getattr(self, name) for name in CacheSettings.model_fields}
        return CacheSettings(**values | {"format": data_format, "targets": targets})


class ImportConfig(Settings):
    """Flags of `qat cache import`."""

    teacher: str | None = None
    """Directory or hub id of a model with the tokenizer that made the tokens; default: the model
    named in the cache's meta.json."""
    held_out: float = Field(0.05, ge=0, lt=1)
    """Fraction of the sequences held out for evaluation; the last ones are taken."""
    keep_negatives: bool = False
    """Keep the random tokens and their logits, although no loss uses them."""
