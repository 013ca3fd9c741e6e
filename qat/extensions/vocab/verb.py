"""The command `qat cache realign`, which serves students with another tokenizer."""

from pathlib import Path

from cyclopts import App

from qat.cli.parser import OTHERS
from qat.config import Required, Text
from qat.errors import ConfigError

realign_app = App(
    name="realign",
    help_format="markdown",
    help_epilogue="Example: qat cache realign caches/theirs --tokenizer STUDENT",
    group_parameters=OTHERS,
)


@realign_app.default
def realign(
    source: Required[Path],
    *,
    tokenizer: Required[str],
    teacher: str | None = None,
    sequence_length: Text[int | None] = None,
    out: Path | None = None,
) -> dict[str, object]:
    """Write a cache for students with another tokenizer; goes on where it stopped.

    Args:
        source: The cache of a teacher with its own tokenizer.
        tokenizer: Directory or hub id of a model with the students' tokenizer.
        teacher: Directory or hub id of a model with the tokenizer of SOURCE; by default the teacher
            that SOURCE names.
        sequence_length: Tokens in a packed sequence; by default as many as in SOURCE.
        out: Directory to write; by default caches/NAME, NAME as SOURCE and TOKENIZER are called.
    """
    from qat.cli.cache import CACHES, cache_numbers  # which imports this module
    from qat.cli.inputs import check_inputs

    out = out or CACHES / f"{source.resolve().name}_for_{Path(tokenizer).stem}"
    check_inputs(models=[tokenizer, teacher], caches=[source], out=out)
    if sequence_length is not None and sequence_length < 2:
        raise ConfigError(
            f"sequence_length={sequence_length}, expected 2 or more: a token and the next one; "
            "raise --sequence-length"
        )
    from qat.extensions.vocab import realign as work

    manifest, counts = work.realign(
        source, out, tokenizer=tokenizer, teacher=teacher, sequence_length=sequence_length
    )
    return dict(out=out, **cache_numbers(out, manifest), **work.summary(counts))
