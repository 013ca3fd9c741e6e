"""The command `qat env`, which lists what is installed and what each extra would add."""

import platform
import shutil
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from qat.errors import DISTRIBUTION, HOME, packages


def env(*, as_json: Annotated[bool, Parameter(name="--json", negative=())] = False) -> dict:
    """Say which versions, devices and memory are here, and what each extra would add.

    Args:
        as_json: Print all facts as one line of JSON, and nothing else.
    """
    found = facts()
    if as_json:
        return found
    from qat.cli.tables import row_table, wide_console
    from qat.extensions.bench.verb import FILE_WIDTH

    extras = found.pop("extras")
    known = [
        {"fact": key, "found": str(value)} for key, value in found.items() if value is not None
    ]
    rows = [{"extra": name, "adds": " ".join(adds) or "-"} for name, adds in extras.items()]
    console = wide_console(FILE_WIDTH)
    for names, body in ((("fact", "found"), known), (("extra", "adds"), rows)):
        columns = tuple((name, name, "{}", 1) for name in names)
        console.print(row_table(columns, body, justify="left"))
    return {}


def facts() -> dict:
    """Return code, versions, devices, free memory and disk, and by extra what it would add."""
    from importlib.metadata import metadata

    from qat.backend import nvidia
    from qat.backend.device import idle_device, select
    from qat.extensions.bench.results import origin
    from qat.process import available_gib

    backend, gpu = select(), nvidia.present()
    device_gib, memory_gib = (
        gib and round(gib, 1) for gib in (backend.memory_gib(), available_gib())
    )
    extras = metadata(DISTRIBUTION).get_all("Provides-Extra", ())
    return {
        **{name: value for name, value in origin().items() if name != "run"},
        "place": HOME,
        "platform": platform.platform(),
        "device": backend.name(),
        "device_gib": device_gib,
        "capabilities": [".".join(map(str, each)) for each in gpu.capabilities] if gpu else None,
        "device_unused": idle_device(),
        "free_memory_gib": memory_gib,
        "free_disk_gib": round(shutil.disk_usage(Path.cwd()).free / 2**30, 1),
        "extras": {extra: lacking(extra) for extra in sorted(extras)},
    }


def lacking(extra: str, of: str = DISTRIBUTION) -> list[str]:
    """Return an extra's requirements that this Python does not meet, as pip reads them."""
    from packaging.requirements import Requirement

    from qat.extensions.bench.results import installed_version

    found: list[str] = []
    for one in map(Requirement, packages(extra, of)):
        version = installed_version(one.name)
        if version is None or not one.specifier.contains(version, prereleases=True):
            found.append(str(one))
        else:  # an extra may ask for extras: `transformers[serving]`
            found += [each for part in sorted(one.extras) for each in lacking(part, one.name)]
    return [*dict.fromkeys(found)]
