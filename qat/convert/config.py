"""Settings of `qat convert`."""

from typing import Literal

from pydantic import Field, field_validator

from qat.config import Attention, Calibration, Formats, Settings, Speed

REPORT_NAME = "convert_report.json"
"""What a conversion says of itself, in the checkpoint that it makes."""


class ConvertConfig(Settings):
    """How to quantize a model, and how it is to attend, without training it."""

    attention: Attention[str | None] = None
    """dense, nsa, nsa-merged, nsa-shared, nsa-merged-shared, nsa-paper, or a TOML file with sizes
    of sparse attention; as the source has it if not given. Without --to nothing is quantized."""
    attention_steps: Attention[int] = Field(100, ge=0)
    """With --attention and --calibration: steps in which gates and pooling come closer to dense
    attention, layer by layer; 0 for none."""
    to: Formats[str | None] = None
    """A preset (q4a4, q2a4, q2a2, q4a4_r4, q4a4_r32, q2a4_r32) or a TOML file with a plan."""
    bits_budget: Formats[float | None] = Field(None, gt=0)
    """Bits per weight to meet with 2, 3 or 4 bits per linear, chosen by measured KL; a plan then
    only says which linears, in which groups (all, in one of two sizes, without a plan)."""
    group_size: Formats[int | None] = Field(None, gt=0)
    """Input features that share a scale; the plan's own if not given."""
    embedding_bits: Formats[Literal[4, 8, "auto"] | None] = None
    """Quantize the embedding and the head too, to 4 or 8 bits, or auto: to what the budget, which
    then holds for them too, is best spent on; as the plan says if not given."""
    base: Formats[str | None] = None
    """Float model to take weights from, where the source is already quantized."""
    calibration: Calibration[str | None] = None
    """Teacher cache or text file whose tokens show what each layer's inputs look like."""
    calibration_sequences: Calibration[int] = Field(256, gt=0)
    """Sequences of it to use, drawn from all that it has."""
    calibration_seed: Calibration[int] = Field(0, ge=0)
    """Seed of that draw."""
    calibration_length: Calibration[int] = Field(256, gt=1)
    """Tokens per sequence of a text file (a cache has its own)."""
    workers: Speed[int] = Field(0, ge=0)
    """Linears fitted at a time without calibration; 0: one per core, or one where a GPU works."""
    device: Speed[str] = "auto"
    """auto, cpu, cuda, cuda:1, ..."""
    trust_remote_code: Speed[bool] = False
    """Run the code that comes with the model or its base (recorded in convert_report.json)."""

    @field_validator("embedding_bits", mode="before")
    @classmethod
    def _number(cls, value: object) -> object:
        """A flag's digits are a number, as a recipe writes it."""
        return int(value) if isinstance(value, str) and value.isdigit() else value
