"""Settings of one start of a run, which no step reads."""

from typing import Annotated, Literal, Self

from cyclopts import Parameter
from pydantic import Field, model_validator

from qat.config import Careful, Settings

LEAST_LOSSES = 4
"""Fewest logged losses of a soak, so that the first and the last quarter have one each."""
Switch = Annotated[bool, Parameter(negative=())]


class LaunchConfig(Settings):
    """Settings of one start of a run: what is done with it, and what fails at its end."""

    resume: Careful[Literal["latest", "auto"] | None] = None
    """Go on with the run in OUT, if there is one, from its newest checkpoint that is whole
    (`latest` may be left out). Where OUT is gone, as in a new session, it is brought back from
    --gdrive-dir. `auto`, for jobs that restart by themselves, also begins anew where a run was
    killed before its first checkpoint, and keeps what that one recorded."""
    dry_run: Careful[Switch] = False
    """Take a few steps, say how long the run will take, what it will hold and what speaks against
    it, and leave nothing behind."""
    force: Careful[Switch] = False
    """Train in spite of the preflight's errors (recorded in run.json)."""
    strict_health: Careful[Switch] = False
    """End with code 1 if a health check at the end is not ok; the student is written all the
    same."""
    soak: Careful[int] = Field(0, ge=0)
    """Stop after this step with a checkpoint for --resume, and end with code 0 or 1 by bounds: no
    stalls, retries of the allocator or fallbacks, gates that are not collapsed, a falling loss."""
    soak_reserved_gib: Careful[float] = Field(0.0, ge=0)
    """With --soak: most memory that PyTorch may reserve on a GPU, in GiB; 0 for no bound."""
    soak_tokens_per_s: Careful[float] = Field(0.0, ge=0)
    """With --soak: least tokens per second, in the median; 0 for no bound."""

    @model_validator(mode="after")
    def _check_soak(self) -> Self:
        if not self.soak and (self.soak_reserved_gib or self.soak_tokens_per_s):
            raise ValueError(
                f"soak_reserved_gib={self.soak_reserved_gib:g}, "
                f"soak_tokens_per_s={self.soak_tokens_per_s:g} without soak, expected its steps; "
                "add --soak STEPS or drop the bounds"
            )
        return self
