"""`qat generate`: let a model speak."""

import sys
import time
from typing import Annotated

from cyclopts import Parameter

from qat.config import Required
from qat.evaluate.config import GenerateConfig
from qat.logs import printable

DEFAULTS = GenerateConfig()


def generate(
    model: Required[str], *, config: Annotated[GenerateConfig, Parameter(name="*")] = DEFAULTS
) -> dict[str, object]:
    """Continue a prompt with MODEL, printing as it goes; say how repetitive the result is.

    Args:
        model: Model directory, run directory, GGUF file or hub id.
        config: Settings.
    """
    from qat.cli.inputs import check_inputs

    check_inputs(models=[model, config.draft])
    from qat.backend.device import seeded, select
    from qat.generate.text import generate_text, open_generator
    from qat.models.decoding import load_decoding

    with select(config.device).session(config.xla_cache_dir):
        generator, tokenizer = open_generator(model, device=config.device, dtype=config.dtype)
        if config.draft is not None:
            generator = load_decoding().drafted(generator, tokenizer, config)
        if config.raw or not tokenizer.chat_template:
            _write(config.prompt)
        start = time.perf_counter()
        with seeded(config.seed):
            said = generate_text(
                generator,
                tokenizer,
                config.prompt,
                max_new_tokens=config.max_new_tokens,
                temperature=config.temperature,
                top_p=config.top_p,
                raw=config.raw,
                stream=_write,
            )
        seconds = time.perf_counter() - start
        _write("\n")
    found = dict(**said._asdict(), tokens_per_s=round(said.num_tokens / seconds, 1))
    if config.draft is not None:
        found |= dict(draft=config.draft, accepted_length=generator.accepted_length)
    return dict(model=model, prompt=config.prompt, **found)


def _write(piece: str) -> None:
    """Show a piece of text at once, without ending the line."""
    sys.stdout.write(printable(piece))
    sys.stdout.flush()
