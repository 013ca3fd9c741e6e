"""Which float model a checkpoint was made from, by what runs, conversions and imports wrote."""

import json
from pathlib import Path

from qat.errors import CheckpointError
from qat.files import parse_toml
from qat.logs import FACTS, RECIPE
from qat.models.anemll import REPORT_NAME as IMPORT
from qat.models.convert import REPORT_NAME as CONVERSION


def float_base(checkpoint: str | Path) -> str:
    """The model that `checkpoint` began with, as far back as reports lead; else itself.

    Raises:
        CheckpointError: a report on the way is damaged.
    """
    found, seen = str(checkpoint), set()
    while found not in seen:
        seen.add(found)
        try:
            found = _made_from(Path(found)) or found
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{found}: what its run or its conversion wrote is damaged ({error}), expected "
                "JSON; restore it, or copy the checkpoint to a directory of its own"
            ) from None
    return found


def _made_from(checkpoint: Path) -> str | None:
    """What a checkpoint (or a run) says that it was made from; None if it says nothing."""
    if not checkpoint.is_dir():  # a hub id
        return None
    place = checkpoint.resolve()
    for run in (place, place.parent, place.parent.parent):
        if (run / RECIPE).is_file() and (run / FACTS).is_file():
            values = parse_toml((run / RECIPE).read_text(encoding="utf-8"))
            return str(values["train"]["student"])
    for name, key in ((IMPORT, "base"), (CONVERSION, "source")):
        if (checkpoint / name).is_file():
            return str(json.loads((checkpoint / name).read_text(encoding="utf-8"))[key])
    return None
