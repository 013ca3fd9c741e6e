"""Settings of `qat sample`: what decides the rows, and where the model runs."""

from typing import Literal

from pydantic import Field

from qat.config import DeviceSettings, Sampling, Settings, Speed, Text
from qat.data.config import DataFormat, Thinking
from qat.errors import ConfigError


class SampleSettings(Settings):
    """Everything that decides the rows, besides the model."""

    prompts: Text[str | None] = None
    """What to answer or continue: whatever 'qat cache --data' reads, of chats all but the last
    answer; without it each row begins from nothing."""
    format: Text[DataFormat] = "auto"
    """What a row of the prompts holds; `auto` looks at the fields of the first row."""
    text_field: Text[str] = "text"
    """Field of a `plain` row that holds the text."""
    thinking: Text[Thinking] = "false"
    """How chats are put to the model: without thinking, with, both, without template (none), all
    three; a row for each."""
    raw: Text[bool] = False
    """Continue plain prompts as they are, not as a user's message in the chat template."""
    rows: Text[int] = Field(0, ge=0)
    """Rows to sample; 0 takes all that the prompts ask for."""
    samples: Text[int] = Field(1, ge=1)
    """Rows of each prompt and thinking mode."""
    least_variety: Text[float] = Field(0.0, ge=0, lt=1)
    """Leave out rows of whose bytes zlib saves more than all but this share: they repeat
    themselves."""
    max_new_tokens: Sampling[int] = Field(512, ge=1)
    """End a row after so many tokens, if the model does not end it before."""
    temperature: Sampling[float] = Field(1.0, ge=0)
    """Sampling temperature; 0 takes the most likely token."""
    top_p: Sampling[float] = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens that holds this mass."""
    seed: Sampling[int] = Field(0, ge=0, lt=2**63)
    """Seed of all rows; each draws by random numbers of its own."""
    batch_size: Speed[int] = Field(256, ge=1)
    """Rows at a time; one that ends makes room for the next."""
    shard_size: Speed[int] = Field(4096, ge=1)
    """Rows between two looks at the disk: what a sampling that was stopped may have to repeat, and
    what a rank takes at a time."""

    def check_asked(self) -> None:
        """Refuse settings that ask for no rows, or for rows of prompts that are not there.

        Raises:
            ConfigError: they do.
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
        """The part that decides the rows."""
        return SampleSettings(**{name: getattr(self, name) for name in SampleSettings.model_fields})
