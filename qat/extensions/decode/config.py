"""Settings of `qat sample`: what decides the rows, and where the model runs."""

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from qat.config import DeviceSettings, Sampling, Settings, Speed, Text
from qat.data.config import DataFormat, Thinking
from qat.errors import ConfigError
from qat.files import parse_json


class SampleSettings(Settings):
    """All settings that decide the sampled rows, apart from the model."""

    prompts: Text[str | None] = None
    """Prompts to answer or continue, in any format of 'qat cache --data', also several with shares:
    FILE:1,FILE:3; the last answer of a chat is dropped. Without prompts each row begins from the
    token that begins a text."""
    format: Text[DataFormat] = "auto"
    """Format of a row of the prompts; `auto` looks at the fields of the first row."""
    text_field: Text[str] = "text"
    """Field of a `plain` row that holds the text."""
    thinking: Text[Thinking] = "false"
    """Chat rendering: thinking off (false), on (true), both, no chat template (none), or all three;
    one row each."""
    raw: Text[bool] = False
    """Continue plain prompts as they are, instead of as a user's message in the chat template."""
    rows: Text[int] = Field(0, ge=0)
    """Number of rows to sample; 0 samples all prompts, of several sources as many as the shares
    allow."""
    samples: Text[int] = Field(1, ge=1)
    """Number of rows per prompt and thinking mode."""
    least_variety: Text[float] = Field(0.0, ge=0, lt=1)
    """Drop repetitive rows: those whose zlib-compressed size is below this fraction of the text."""
    max_new_tokens: Sampling[int] = Field(512, ge=1)
    """Maximum number of new tokens in a row."""
    temperature: Sampling[float] = Field(1.0, ge=0)
    """Sampling temperature; 0 takes the most likely token."""
    top_p: Sampling[float] = Field(1.0, gt=0, le=1)
    """Nucleus sampling: draw from the smallest set of tokens with this probability mass."""
    seed: Sampling[int] = Field(0, ge=0, lt=2**63)
    """Seed of all rows; each row has its own random stream."""
    batch_size: Speed[int] = Field(256, ge=1)
    """Rows in flight at once; a finished row is replaced by the next."""
    shard_size: Speed[int] = Field(4096, ge=1)
    """Rows per shard. A shard is the unit of work of a rank and is written when all its rows have
    ended; an interrupted run repeats the unfinished shards."""

    def check_asked(self) -> None:
        """Refuse settings without anything to sample, or with samples per prompt but no prompts.

        Raises:
            ConfigError: `rows` is 0 without prompts, or `samples` is set without prompts.
        """
        if self.prompts is None and self.rows == 0:
            raise ConfigError(
                "rows=0 and no prompts, expected something to sample; give --rows N to begin from "
                "nothing, or --prompts FILE"
            )
        if self.prompts is None and self.samples > 1:
            raise ConfigError(
                f"samples={self.samples} rows of each prompt, but there are no prompts; give "
                "--prompts FILE, or say with --rows how many"
            )


class SampleConfig(SampleSettings, DeviceSettings):
    """Flags of `qat sample`."""

    dtype: Speed[Literal["auto", "fp32", "bf16", "fp16"]] = "auto"
    """The model's precision; auto is bf16 where it is native, fp16 on other GPUs, else fp32."""
    trust_remote_code: Speed[bool] = False
    """Run the code that comes with the model."""

    def settings(self) -> SampleSettings:
        """Return the settings that decide the rows."""
        return SampleSettings(**{name: getattr(self, name) for name in SampleSettings.model_fields})


def sampled_facts(out: Path) -> dict[str, Any] | None:
    """Return what the first row of `out` says about its sampling; None if there is no such file.

    Raises:
        ConfigError: `out` was not written by `qat sample`.
    """
    if not out.exists():
        return None
    try:
        with out.open(encoding="utf-8") as file:
            facts = parse_json(file.readline())["sampled"]
        facts["run"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(
            f"out={out} was not written by 'qat sample', expected a new file; choose another --out"
        ) from None
    return facts
