"""Hashes that a packed checkpoint has of its own files, so that damage is never taken for sound."""

import json
from pathlib import Path

from qat.errors import CheckpointError
from qat.files import inside, sha256_file

CHECKSUMS = "checksums.json"
FORMAT = 1
MODEL = (".safetensors", ".index.json", "config.json")
"""How the names of files end that decide what a model computes."""
BESIDE = (CHECKSUMS, "convert_report.json", "plan.toml")
"""What 'qat convert' writes beside the files that are listed."""


def write_checksums(directory: Path) -> None:
    """List the SHA-256 of every file in `directory` in its `checksums.json`."""
    paths = sorted(path for path in directory.iterdir() if path.is_file())
    files = {path.name: sha256_file(path) for path in paths if path.name != CHECKSUMS}
    text = json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n"
    (directory / CHECKSUMS).write_text(text, encoding="utf-8")


def check_checksums(directory: Path, *, of_model: bool) -> None:
    """Compare the files of the model, or all others that are listed, with `checksums.json`.

    A checkpoint without such a file is taken as it is; so is a file that is not listed.

    Raises:
        CheckpointError: a file is missing or differs, or the list is damaged.
    """
    path = directory / CHECKSUMS
    if not path.is_file():
        return
    try:
        values = json.loads(path.read_bytes())
        listed = dict(values["files"])
        is_known = values["format"] == FORMAT and all(isinstance(v, str) for v in listed.values())
    except (ValueError, TypeError, KeyError, RecursionError):
        is_known = False
    if not is_known or "config.json" not in listed:
        raise CheckpointError(
            f"{path} is damaged, expected a format and a table of files; copy the checkpoint anew"
        )
    files = {n: inside(directory, n, found_in=path, error=CheckpointError) for n in listed}
    for name, digest in listed.items():
        if _is_of_model(name) != of_model:
            continue
        file = files[name]
        if not file.is_file() or sha256_file(file) != digest:
            what = "differs from its SHA-256" if file.is_file() else "is missing"
            raise CheckpointError(
                f"{file} {what} in {CHECKSUMS}, expected what was written; copy it anew, or, if "
                f"you changed it yourself, delete {CHECKSUMS}"
            )


def listed_files(directory: Path) -> set[str]:
    """The names of the files in `directory` that qat wrote there; none without a sound list."""
    path = directory / CHECKSUMS
    try:
        return {*BESIDE, *json.loads(path.read_bytes())["files"]}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return set()


def _is_of_model(name: str) -> bool:
    return name.endswith(MODEL) and not name.startswith(("tokenizer", "special", "generation"))
