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

    check_inputs(models=[model])
    from qat.backend.device import seeded, select
    from qat.generate.text import generate_text, open_generator

    with select(config.device).session(config.xla_cache_dir):
        generator, tokenizer = open_generator(model, device=config.device, dtype=config.dtype)
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
    tokens_per_s = round(said.num_tokens / seconds, 1)
    return dict(model=model, prompt=config.prompt, **said._asdict(), tokens_per_s=tokens_per_s)


def _write(piece: str) -> None:
    """Show a piece of text at once, without ending the line."""
    sys.stdout.write(printable(piece))
    sys.stdout.flush()
