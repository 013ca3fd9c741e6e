"""What a verb leaves on standard output: one JSON object on the last line."""

import json
import sys
from pathlib import Path


def print_result(**values: object) -> None:
    """Write `values` as one line of JSON; paths become strings."""
    plain = {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
    sys.stdout.write(json.dumps(plain) + "\n")
    sys.stdout.flush()
