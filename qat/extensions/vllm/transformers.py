"""The server of transformers for packed checkpoints.

    python -m qat.extensions.vllm.transformers serve DIR

`transformers serve` loads no plug-ins, so it cannot read packed weights. This program runs the same
command line after `import qat`, which registers the format.
"""

import sys

from qat.errors import ConfigError, QatError, how_to_install
from qat.extensions.vllm.packed import in_one_line, refused_path


def main() -> None:
    """Run transformers' command line; print one line if a checkpoint or path cannot be served."""
    from transformers.cli.transformers import app
    from transformers.utils.import_utils import is_serve_available

    try:
        match sys.argv:
            case [_, "serve", source, *_] if refusal := refused_path(source):
                raise refusal
        if not is_serve_available():
            raise ConfigError(
                "the server of transformers misses packages of its own, expected fastapi, uvicorn "
                f"and openai; run: {how_to_install('serving')}"
            )
        app()
    except QatError as error:
        sys.stderr.write(in_one_line(error))
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
