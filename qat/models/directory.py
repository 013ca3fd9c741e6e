"""Model directories: how a source is resolved, its hashes, and atomic writing of new ones."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from safetensors import SafetensorError

from qat.errors import CheckpointError
from qat.files import (
    described,
    explained,
    import_command,
    inside,
    is_real,
    listed_files,
    parse_json,
    sha256_file,
    whole_directory,
)
from qat.logs import RECIPE, STUDENT
from qat.online import is_online
from qat.process import cores

if TYPE_CHECKING:  # nothing here needs transformers
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")

# Resolution of a source: a directory, a run, or a hub id.

RUN_POINTERS = ("best", "latest")
"""Files of a run directory that name one of its checkpoints, in order of preference."""
GGUF = ".gguf"
"""File name suffix of llama.cpp's files, which hold a whole model with its tokenizer."""
ADAPTER = "adapter_config.json"
"""The file of a directory without config.json whose model is another one with a peft adapter."""
SOURCES = "a model directory, a run directory, a GGUF file or a hub id"
"""The kinds of sources, for messages."""
FOLDER = re.compile(r"[A-Za-z0-9_]{1,64}")
"""Allowed content of that file: the name of a directory in the same place."""
CHECKPOINTS = "checkpoints"
"""Folder of a run with its checkpoints."""
STEP_NAME = re.compile(r"step-[0-9]{6,18}")
"""Names of checkpoints in a run."""
POINTER_BYTES = 4096
"""Bytes read at most from a pointer file; a checkpoint's name takes about 25 bytes."""


def resolve(source: str) -> str:
    """Return the model directory, GGUF file or hub id for `source`; a run gives a checkpoint.

    Raises:
        CheckpointError: `source` is a path without a model, or one that must be imported first.
        HubError: `source` may be a hub id, but the hub does not have it or does not respond.
    """
    if not source.strip():  # Path("") is the working directory
        raise CheckpointError(f"the model's name is empty, expected {SOURCES}; name one")
    path = Path(source)
    theirs = import_command(path)
    if theirs is not None:
        raise CheckpointError(
            f"{source} holds pickled tensors (.pt), expected {SOURCES}; if "
            f"Anemll/qwen3_apple_style_2bit_qat_lora wrote it: {theirs}"
        )
    if (path / "config.json").is_file() or adapted(source):
        check_indices(path)
        return source
    is_gguf = path.suffix == GGUF and path.is_file()
    if found := [path] if is_gguf else sorted(path.glob(f"*{GGUF}")):
        if len(found) > 1:
            raise CheckpointError(
                f"{source} holds {len(found)} GGUF files, expected one; name the one you mean, "
                f"such as {found[0]}"
            )
        return str(found[0])
    for pointer in RUN_POINTERS:
        if (path / pointer).is_file():
            return str(_checkpoint_of(path, pointer))
    if (path / STUDENT).is_file():
        return resolve(str(_student_in(path)))
    if path.exists():
        raise _no_model(source)
    return _hub_id(source)


def _checkpoint_of(run: Path, pointer: str) -> Path:
    checkpoint = pointed(run, pointer)
    if checkpoint is None or not (checkpoint / "config.json").is_file():
        raise CheckpointError(
            f"{run / pointer} names {_read_pointer(run / pointer)[:80]!r}, which holds no "
            "config.json or is no checkpoint of this run; expected one: name another of its "
            "checkpoints yourself"
        )
    check_indices(checkpoint)
    return checkpoint


def _student_in(path: Path) -> Path:
    name = _read_pointer(path / STUDENT)
    found = path / name
    if not FOLDER.fullmatch(name) or found.is_symlink() or not found.is_dir():
        raise CheckpointError(
            f"{path / STUDENT} names {name[:80]!r}, which is no directory there, expected that of "
            "a student; call 'qat run' again, or name the student yourself"
        )
    return found


def _no_model(source: str) -> CheckpointError:
    """Return the error for a path that is no model; it lists the models that lie in it."""
    path = Path(source)
    names = ("config.json", *RUN_POINTERS)
    folders = sorted(path.iterdir()) if path.is_dir() else []
    models = [str(each) for each in folders if any((each / name).is_file() for name in names)]
    hint = "check the path"
    if models:
        hint = f"name one that lies in it: {', '.join(models)}"
    elif (path / RECIPE).is_file():
        hint = "it has none yet: the command that began it goes on if you call it again"
    return CheckpointError(
        f"{source} {described(path)} without a model in it, expected {SOURCES}; {hint}"
    )


def stored_config(source: str) -> dict[str, object]:
    """Return the config.json of the model `source`; nothing for a GGUF file, a hub id or no object.

    It is only for early refusals: opening the model checks the file.
    """
    path = Path(resolve(source), "config.json")
    try:
        values = parse_json(path.read_bytes()) if path.is_file() else {}
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def is_path(source: str) -> bool:
    """Return whether a missing `source` is a mistyped path, and not an `owner/name` of a hub."""
    path = Path(source)
    begins_so = source.startswith((".", "/", "~"))
    return begins_so or path.parent.is_dir() or len(path.parts) != 2


def _hub_id(source: str) -> str:
    if is_path(source):
        hint = "check the path"
        if "://" in source:
            hint = "'qat cache' asks a teacher behind a server, and students learn from that cache"
        raise CheckpointError(f"{source} does not exist; expected {SOURCES}: {hint}")
    is_online(source)
    return source


def adapted(source: str) -> str | None:
    """Return the resolved source of the base model of the adapter in `source`; None without one.

    Raises:
        CheckpointError: the base of the adapter is no model, or has an adapter itself.
    """
    path = Path(source, ADAPTER)
    if not path.is_file() or Path(source, "config.json").is_file():
        return None
    try:
        base = parse_json(path.read_bytes())["base_model_name_or_path"]
        is_named = isinstance(base, str) and bool(base)
    except (ValueError, TypeError, KeyError):
        is_named = False
    if not is_named:
        raise CheckpointError(
            f"{path} names no model, expected base_model_name_or_path; write there which model the "
            "adapter is for"
        )
    if (Path(base) / ADAPTER).is_file():
        raise CheckpointError(
            f"{path} is for {base}, which has an adapter itself, expected a model; merge that one "
            "first"
        )
    try:
        return resolve(base)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is for {base}, which is not found: {error}") from error


def as_transformers_asks(source: str) -> tuple[str, dict[str, str]]:
    """Return a resolved source as arguments of `from_pretrained`.

    These are the path and, if it is one, the GGUF file. For an adapter they are those of its base
    model.
    """
    source = adapted(source) or source
    path = Path(source)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == GGUF else (source, {})


def pointed(run: Path, pointer: str) -> Path | None:
    """Return the checkpoint of `run` that its file `best` or `latest` names; it need not exist.

    None if there is no such file, if it names anything else, or if either path has a symbolic link.
    """
    folder, _, name = _read_pointer(run / pointer).partition("/")
    is_one = folder == CHECKPOINTS and STEP_NAME.fullmatch(name)
    return run / folder / name if is_one and is_real(run / folder / name, run) else None


def _read_pointer(pointer: Path) -> str:
    if pointer.is_symlink() or not pointer.is_file():
        return ""
    with pointer.open("rb") as file:
        return file.read(POINTER_BYTES).decode(errors="replace").strip()


def check_indices(directory: Path) -> None:
    """Check that the weight files named in indices are in the model's directory.

    Raises:
        CheckpointError: a name leads elsewhere, or an index is damaged.
    """
    for kind in ("safetensors", "bin"):
        for path in directory.glob(f"*.{kind}.index.json"):
            try:
                named = {*parse_json(path.read_bytes())["weight_map"].values()}
            except (ValueError, TypeError, KeyError, AttributeError):
                raise CheckpointError(
                    f"{path} is damaged, expected a table of weights and their files; copy it anew"
                ) from None
            for name in named:
                inside(directory, name, found_in=path, error=CheckpointError)


def needs_no_hub(source: str) -> bool:
    """Return whether the files of a resolved `source` are read without a request to a hub."""
    return Path(source).exists() or not is_online(source)


# Checksums of a packed checkpoint's files, which detect damage.


CHECKSUMS = "checksums.json"
"""File of a directory with the SHA-256 of its files."""
FORMAT = 1  # of the list of checksums
BESIDE = (CHECKSUMS, "convert_report.json", "plan.toml")
"""Files that 'qat convert' writes in addition to the listed ones."""
WEIGHTS = ".safetensors"
SETTLED_S = 2.0
"""Files changed within so many seconds are hashed on every request."""


def write_checksums(directory: Path) -> None:
    """List the SHA-256 of every file in `directory` in its `checksums.json`."""
    paths = sorted(path for path in directory.iterdir() if path.is_file())
    names = [path.name for path in paths if path.name != CHECKSUMS]
    digests = _of_all(sha256_file, [directory / name for name in names])
    files = dict(zip(names, digests, strict=True))
    text = json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n"
    (directory / CHECKSUMS).write_text(text, encoding="utf-8")


def check_checksums(directory: Path, *, weights: bool, has: str = "config.json") -> None:
    """Compare every listed file with `checksums.json` before any of them is used.

    Without `weights` safetensors files are skipped, for callers that read none. Files that were
    compared and have not changed since are not read again. A directory without `checksums.json` is
    accepted, and so is a file that is not listed.

    Raises:
        CheckpointError: a file is missing or differs, or the list is damaged, or lacks the file
            that every such directory `has`.
    """
    path = directory / CHECKSUMS
    if not path.is_file():
        return
    try:
        values = parse_json(path.read_bytes())
        listed = dict(values["files"])
        is_known = values["format"] == FORMAT and all(isinstance(v, str) for v in listed.values())
    except (ValueError, TypeError, KeyError):
        is_known = False
    if not is_known or has not in listed:
        raise CheckpointError(
            f"{path} is damaged, expected a format and a table of files; copy the checkpoint anew"
        )
    files = {n: inside(directory, n, found_in=path, error=CheckpointError) for n in listed}
    files = {n: path for n, path in files.items() if weights or not n.endswith(WEIGHTS)}
    for file in files.values():
        if not file.is_file():
            raise CheckpointError(
                f"{file} is missing, expected every file that {CHECKSUMS} lists; copy the "
                f"checkpoint anew, or, if you removed it yourself, delete {CHECKSUMS}"
            )
    for name, digest in zip(files, _of_all(settled_sha256, [*files.values()]), strict=True):
        if digest != listed[name]:
            raise CheckpointError(
                f"{files[name]} differs from its SHA-256 in {CHECKSUMS}, expected what was "
                f"written; copy it anew, or, if you changed it yourself, delete {CHECKSUMS}"
            )


def _of_all(digest: Callable[[Path], str], files: Sequence[Path]) -> list[str]:
    with ThreadPoolExecutor(max(1, min(cores(), len(files)))) as pool:
        return [*pool.map(digest, files)]


def settled_sha256(file: Path) -> str:
    """Return the SHA-256 of a file, cached as `settled` does."""
    return settled(sha256_file, file)


def settled(read: Callable[[Path], T], file: Path) -> T:
    """Return `read(file)`, cached until the file's size, inode or change time differ.

    Files changed a moment ago could change again within one clock tick, so they are always read.
    """
    found = file.stat()
    if abs(time.time() - found.st_ctime) < SETTLED_S:
        return read(file)
    return _read_of(read, file.absolute(), found.st_ino, found.st_size, found.st_ctime_ns)


@lru_cache(maxsize=1024)
def _read_of(read: Callable[[Path], T], file: Path, _inode: int, _size: int, _changed_ns: int) -> T:
    return read(file)


@contextmanager
def atomic_directory(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a directory to fill; it becomes `out` when the block ends and is removed if it fails.

    With `replace`, an older `out` stays until the new one is complete; then it is removed, except
    for files that qat did not write.

    Raises:
        ConfigError: `out` is not empty and `replace` is false.
        CheckpointError: the disk is full, or `out` cannot be written for another reason.
    """
    whole = whole_directory(
        out, replace=replace, written=lambda out: listed_files(out / CHECKSUMS, BESIDE)
    )
    with explained(out, CheckpointError, SafetensorError), whole as partial:
        yield partial


def save_tokenizer(tokenizer: "PreTrainedTokenizerBase", directory: Path) -> None:
    """Write the files of a tokenizer to `directory`.

    Raises:
        OSError: the disk is full, or the directory cannot be written for another reason.
    """
    try:
        tokenizer.save_pretrained(directory)
    except Exception as error:  # noqa: BLE001 - tokenizers raises a bare Exception for a full disk
        if type(error) is not Exception:
            raise
        raise OSError(f"the tokenizer cannot be written: {error}") from error
