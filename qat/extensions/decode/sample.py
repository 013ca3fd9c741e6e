"""`qat sample`: text from a teacher, to learn from."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qat.config import Required
from qat.errors import ConfigError
from qat.extensions.decode.config import SampleConfig, sampled_facts

DEFAULTS = SampleConfig()


def sample(
    model: Required[str],
    *,
    out: Required[Path],
    config: Annotated[SampleConfig, Parameter(name="*")] = DEFAULTS,
) -> dict[str, object]:
    """Write what MODEL says as rows that 'qat cache --data' reads; goes on where it stopped.

    Args:
        model: Model directory, run directory, GGUF file or hub id.
        out: File to write, .jsonl.
        config: Settings.
    """
    from qat.cli.inputs import check_inputs
    from qat.data.sources import check_source
    from qat.data.template import start_rendering

    config.check_asked()
    if out.suffix != ".jsonl" or out.is_dir():
        found = "is a directory" if out.is_dir() else f"ends in {out.suffix!r}"
        raise ConfigError(f"out={out} {found}, expected a .jsonl file; choose another --out")
    sampled_facts(out)
    check_inputs(models=[model], out=out.absolute().parent)
    if config.prompts is not None:
        check_source(config.prompts, config.format, config.text_field, setting="prompts")
        if not config.raw:
            start_rendering()
    from qat.backend.device import select
    from qat.extensions.decode.corpus import open_corpus, write_corpus
    from qat.ranks import joined

    session = select(config.device).session(config.xla_cache_dir)
    with session, joined(config.device, exchange=False) as ranks:
        opened, corpus = open_corpus(model, config, ranks)
        found = write_corpus(opened, corpus, out, ranks)
    return dict(out=out, **found._asdict()) if ranks.is_first else {}
