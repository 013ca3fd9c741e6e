"""What a verb leaves on standard output: one JSON object on the last line."""

import json
import sys
from collections.abc import Mapping


def print_result(found: Mapping[str, object]) -> None:
    """Write what a verb returned as one line of JSON, paths as strings; nothing if it is empty."""
    if found:
        sys.stdout.write(json.dumps(found, default=str) + "\n")
        sys.stdout.flush()
