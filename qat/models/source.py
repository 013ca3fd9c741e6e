"""What a user may call a model: a directory, a run, or a hub id. Loads nothing."""

import json
import re
from pathlib import Path

from qat.errors import CheckpointError
from qat.files import import_command, inside
from qat.online import is_online

RUN_POINTERS = ("best", "latest")
"""Files of a run directory that name one of its checkpoints, in order of preference."""
CHECKPOINTS = "checkpoints"
STEP_NAME = re.compile(r"step-[0-9]{6,}")


def resolve(source: str) -> str:
    """The model directory or hub id behind `source`: a run directory gives one of its checkpoints.

    Raises:
        CheckpointError: `source` is a path without a model, or one that is to be imported.
        HubError: `source` may be a hub id, but the hub does not know it or does not answer.
    """
    path = Path(source)
    theirs = import_command(path)
    if theirs is not None:
        raise CheckpointError(
            f"{source} holds pickled tensors (.pt), expected a model directory, a run directory or "
            f"a hub id; if Anemll/qwen3_apple_style_2bit_qat_lora wrote it: {theirs}"
        )
    if (path / "config.json").is_file():
        _check_indices(path)
        return source
    if found := [path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf")):
        raise CheckpointError(
            f"{found[0]} is a GGUF file, expected a model directory in the form of Hugging Face; "
            "download that, or make it with transformers: from_pretrained(DIR, gguf_file=NAME) of "
            "model and tokenizer, and save_pretrained of both"
        )
    for pointer in RUN_POINTERS:
        if (path / pointer).is_file():
            checkpoint = pointed(path, pointer)
            if checkpoint is None or not (checkpoint / "config.json").is_file():
                raise CheckpointError(
                    f"{path / pointer} names {_said(path / pointer)[:80]!r}, which holds no "
                    "config.json or is no checkpoint of this run; expected one: name another of "
                    "its checkpoints yourself"
                )
            _check_indices(checkpoint)
            return str(checkpoint)
    if path.exists():
        raise CheckpointError(
            f"{source} holds neither config.json nor a run's checkpoint; expected a model "
            "directory, a run directory or a hub id: check the path"
        )
    if not _may_be_hub_id(source):
        raise CheckpointError(
            f"{source} does not exist; expected a model directory, a run directory or a hub id: "
            "check the path"
        )
    is_online(source)
    return source


def pointed(run: Path, pointer: str) -> Path | None:
    """The checkpoint of `run` that its file `best` or `latest` names, there or not.

    None where there is no such file, or it names anything else.
    """
    folder, _, name = _said(run / pointer).partition("/")
    is_one = folder == CHECKPOINTS and STEP_NAME.fullmatch(name)
    return run / folder / name if is_one else None


def _said(pointer: Path) -> str:
    return pointer.read_bytes().decode(errors="replace").strip() if pointer.is_file() else ""


def _check_indices(directory: Path) -> None:
    """Refuse an index of weights that names files outside of the model's directory."""
    for kind in ("safetensors", "bin"):
        for path in directory.glob(f"*.{kind}.index.json"):
            try:
                named = {*json.loads(path.read_bytes())["weight_map"].values()}
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                raise CheckpointError(
                    f"{path} is damaged, expected a table of weights and their files; copy it anew"
                ) from None
            for name in named:
                inside(directory, name, found_in=path, error=CheckpointError)


def is_kept_here(source: str) -> bool:
    """Whether the files of a resolved `source` are read without asking a hub."""
    return Path(source).is_dir() or not is_online(source)


def _may_be_hub_id(source: str) -> bool:
    """Whether `source` looks like `owner/name`, not like a path below what is here."""
    path = Path(source)
    return (
        not source.startswith((".", "/", "~")) and len(path.parts) == 2 and not path.parent.is_dir()
    )
