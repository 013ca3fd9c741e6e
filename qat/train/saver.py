"""Background saves of a run, and checks of its checkpoints.

A save copies the state to host memory, then writes files on a background thread. A checkpoint gets
its name, and pointers name it, only after its files have been read back and compared; if files are
damaged later, the newest whole checkpoint is used instead.
"""

import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from qat.backend.copies import Copying, KeptCopies
from qat.backend.device import on
from qat.config import fingerprint
from qat.data.pipeline import BackgroundFold
from qat.errors import CheckpointError, TrainingError
from qat.files import file_problem, parse_json, real_files, sha256_file, sync
from qat.logs import METRICS, STATE_TENSORS
from qat.models.checkpoint import write_checkpoint
from qat.models.directory import atomic_directory
from qat.models.language_model import LanguageModel
from qat.models.stored_state import RawState, raw_state, stored_state
from qat.ranks import Ranks
from qat.train.finite import not_finite
from qat.train.optim import Optimizer
from qat.train.run import FORMAT, MANIFEST, STATE, RunDirectory, read_state

# Checks that a checkpoint holds what was saved: it is compared with memory when it is written, and
# by its hashes later.

NEEDED = ("config.json", STATE, STATE_TENSORS)
"""Files that every checkpoint of a run has, besides those of its weights."""
PIECE_BYTES = 2**20
"""Bytes read at a time to be compared, few enough to stay in a core's cache."""


def prove(directory: Path, *written: dict[str, Tensor]) -> None:
    """Compare each tensor file in `directory` with the tensors in memory, then list all hashes.

    They are compared as read back from the disk, not from the page cache.

    Raises:
        CheckpointError: a file holds something else, or a tensor holds NaN or infinity.
    """
    meant = {name: tensor for tensors in written for name, tensor in tensors.items()}
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    of_tensors = [path for path in files if path.suffix == ".safetensors"]
    # a hash takes longest, so it is taken of the page cache while the disk still writes; that the
    # disk holds the same is what the comparison shows
    with ThreadPoolExecutor(len(files) + 1) as threads:
        hashes = threads.map(sha256_file, files)
        if which := not_finite(meant):
            raise CheckpointError(
                f"{which}, expected numbers to save; lower --lr and its kin, or --clip-grad-norm, "
                "and go on from an older checkpoint"
            )
        headers = [_header(path) for path in of_tensors]
        for path in of_tensors:
            _forget_pages(path)
        for _ in threads.map(partial(_compare, meant=meant), of_tensors, headers):
            pass
    listed = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, hashes, strict=True)
    }
    manifest = {"format": FORMAT, "files": listed}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def problem(checkpoint: Path, *, is_student: bool = False) -> str | None:
    """Return what is wrong with a run's checkpoint, in a few words; None if it is whole.

    A checkpoint that holds NaN is damaged too, even if its bytes are as they were written.

    One that is older than manifests is only checked for NaN and a readable trainer's state. With
    `is_student`, the tensors of the trainer's state may be missing.
    """
    try:
        if not checkpoint.is_dir():
            return "it is not there"
        there = real_files(checkpoint, error=CheckpointError)
        if (checkpoint / MANIFEST).exists():
            names = {path.relative_to(checkpoint).as_posix() for path in there}
            found = _mismatch(checkpoint, names, is_student=is_student)
            if found is not None:
                return found
        step = read_state(checkpoint)["step"]
        state = [] if is_student else [checkpoint / STATE_TENSORS]
        for path in [*sorted(checkpoint.glob("*.safetensors")), *state]:
            with safe_open(path, framework="pt") as file:
                spoilt = (not_finite({name: file.get_tensor(name)}) for name in file.keys())
                if which := next(filter(None, spoilt), None):
                    return f"{path.relative_to(checkpoint).as_posix()}: {which}"
        is_named_so = checkpoint.name == f"step-{step:06d}"
        return None if is_named_so else f"{STATE}: it is of step {step}"
    except (OSError, ValueError, RecursionError, SafetensorError, CheckpointError) as error:
        return " ".join(str(error).split())


def _mismatch(checkpoint: Path, there: set[str], *, is_student: bool) -> str | None:
    """Return the first difference between the files and the manifest."""
    manifest = parse_json((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"{MANIFEST}: unknown format"
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(v, dict) for v in files.values()):
        return f"{MANIFEST}: no table of files"
    unlisted = {n for n in there if n.endswith((".json", ".safetensors"))} - files.keys()
    for name in (*NEEDED, *sorted(unlisted - {MANIFEST})):
        if name not in files:
            return f"{MANIFEST}: does not list {name}"
    for name, listed in files.items():
        if is_student and name == STATE_TENSORS:
            continue
        size, sha256 = listed.get("bytes"), listed.get("sha256")
        found = file_problem(checkpoint / name, size, sha256) if name in there else "missing"
        if found is not None:
            return f"{name}: {found}"
    return None


def _forget_pages(path: Path) -> None:
    """Drop a file from the page cache where possible, so that it is next read from the disk."""
    sync(path)
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _header(path: Path) -> bytes:
    """Return what stands before a file's tensors: 8 bytes of length, and JSON with their places."""
    with path.open("rb") as file:
        length = file.read(8)
        return length + file.read(int.from_bytes(length, "little"))


def _compare(path: Path, written: bytes, meant: dict[str, Tensor]) -> None:
    # not by safe_open: safetensors 0.8.0 leaks 64 bytes per tensor read
    with path.open("rb") as file:
        if file.read(len(written)) != written:
            raise _reads_otherwise(path, "its header")
        header = parse_json(written[8:])
        for name in sorted(header.keys() & meant.keys(), key=lambda n: header[n]["data_offsets"]):
            begin, end = header[name]["data_offsets"]
            file.seek(len(written) + begin)
            is_alike = header[name]["shape"] == [*meant[name].shape]
            if not (is_alike and end - begin == meant[name].nbytes and _reads(file, meant[name])):
                raise _reads_otherwise(path, name)


def _reads_otherwise(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name}: {what} reads otherwise than it was written, expected the same bytes; the "
        "disk or the memory fails: choose another --out or machine"
    )


def _reads(file: BufferedReader, tensor: Tensor) -> bool:
    """Return whether the file goes on with the tensor's bytes; NaN compare by their bits."""
    octets = tensor.detach().flatten().view(torch.uint8).numpy()
    room = memoryview(bytearray(PIECE_BYTES))
    for own in (octets[first : first + len(room)] for first in range(0, len(octets), len(room))):
        read = room[: len(own)]
        if file.readinto(read) != len(own) or not np.array_equal(
            np.frombuffer(read, np.uint8), own
        ):
            return False
    return True


MODEL = "model."
"""Prefix of the model's tensors among the trainer's, in memory only."""


class _Copy(NamedTuple):
    """A run's state after a step."""

    path: Path
    tensors: dict[str, Tensor]
    """Copies on the host; names of the model's raw state start with `model.`."""
    copying: Copying
    facts: dict[str, object]
    is_best: bool


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


class HasState(Protocol):
    """State that a resumed run needs, besides the student's and the optimizer's."""

    def state(self) -> dict[str, Tensor]:
        """Return tensors for a checkpoint under names of its own; all ranks call this together."""


class Saver:
    """Writes the checkpoints of one run in the background, one at a time; moves its pointers."""

    def __init__(
        self,
        run: RunDirectory,
        student: LanguageModel,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: Optimizer,
        *,
        beside: Sequence[HasState],
        keep: int,
        milestone_every: int,
        ranks: Ranks,
    ) -> None:
        self._run = run
        self._student = student
        self._tokenizer = tokenizer
        self._optimizer = optimizer
        self._beside = beside
        self._keep, self._milestone_every = keep, milestone_every
        self._ranks = ranks
        self._backend = on(student.device)
        self._behind: BackgroundFold[None, _Copy] = BackgroundFold(self._write, None)
        self._kept = KeptCopies()
        """Host copies of tensors that do not learn."""
        self.saved: int | None = None
        """The step that was saved last."""

    def save(self, step: int, best: float, *, is_best: bool) -> None:
        """Copy the state after `step` and queue it for writing; all ranks call, the first writes.

        Waits for the previous save; for the device the first time only.

        Raises:
            CheckpointError: the previous save could not be written, or held a scale that is not
                finite as stored.
        """
        self._behind.state()  # wait for the previous save
        # sharded tensors are gathered by all ranks together
        raw, gathered = raw_state(self._student.model), self._optimizer.gathered()
        generators = self._backend.generators().items()
        rng = {f"rng.{name}": each.get_state() for name, each in generators}
        state = {**self._optimizer.state(), **rng}
        for each in self._beside:
            state |= each.state()
        self.saved = step
        if not self._ranks.is_first:
            return
        facts = {"format": FORMAT, "step": step, "best": best, **self._run.identity}
        copies, copying = self._copied(raw, state)
        self._optimizer.copying = copying  # the next step moves parameters only after the copies
        path = self._run.checkpoint_path(step)
        # the copies follow those of the gathered tensors, so waiting for them waits for both
        self._behind.push(_Copy(path, copies | gathered, copying, facts, is_best))

    def finish(self) -> None:
        """Wait until all saves are written.

        Raises:
            CheckpointError: the last save could not be written.
        """
        self._behind.state()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._behind.__exit__(None, None, None)

    def _copied(self, raw: RawState, state: dict[str, Tensor]) -> tuple[dict[str, Tensor], Copying]:
        """Copy the model's raw state, under names with `model.`, and `state`.

        Tensors that do not learn are copied once, by the first save, which waits for the copies; on
        the host the tensors themselves are used.
        """
        learning = {MODEL + name for name in self._optimizer.parameters}
        own = {MODEL + name: tensor for name, tensor in raw.own.items()}
        still = {name: tensor for name, tensor in own.items() if name not in learning}
        missing = self._kept.missing(still)
        if missing:
            elsewhere = {n: tensor for n, tensor in missing.items() if not _is_on_host(tensor)}
            copies, copying = self._backend.copied_to_host(elsewhere)
            copying.wait()
            self._kept.keep(missing, missing | copies)
        moving = {name: tensor for name, tensor in own.items() if name not in still}
        made = {MODEL + name: tensor for name, tensor in raw.made.items()}
        copies, copying = self._backend.copied_to_host(moving | made | state)
        return copies | self._kept.of(list(still)), copying

    def _write(self, _: None, copy: _Copy) -> None:
        """Write and verify a checkpoint, then move the pointers; runs on the background thread."""
        copy.copying.wait()
        raw: dict[str, Tensor] = {}
        state: dict[str, Tensor] = {}
        for name, tensor in copy.tensors.items():
            (raw if name.startswith(MODEL) else state)[name.removeprefix(MODEL)] = tensor
        packed = stored_state(self._student.model, raw)  # indices and scales of latent weights
        with (
            atomic_directory(copy.path, replace=True) as partial,
            ThreadPoolExecutor(1) as thread,
        ):
            (partial / STATE).parent.mkdir()
            large = thread.submit(safetensors.torch.save_file, state, partial / STATE_TENSORS)
            write_checkpoint(self._student.model, self._tokenizer, partial, packed)
            (partial / STATE).write_text(json.dumps(copy.facts) + "\n", encoding="utf-8")
            large.result()
            prove(partial, packed, state)
        metrics = self._run.path / METRICS
        if metrics.exists():  # metrics up to this step must survive a crash after it
            sync(metrics)
        if copy.is_best:
            self._run.point("best", copy.path)
        self._run.point("latest", copy.path)
        self._run.remove_old(self._keep, self._milestone_every)


def digest(tensors: Iterable[Tensor]) -> str:
    """Return 12 hex digits of tensors' bits, order and shapes; waits for the device.

    Bits are summed as integers, so that the order of summation does not matter.
    """
    words = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
    tensors = [tensor.detach() for tensor in tensors]
    sums = [tensor.view(words[tensor.itemsize]).sum() for tensor in tensors]
    bits = torch.stack(sums).tolist() if sums else []
    return fingerprint([[tuple(tensor.shape) for tensor in tensors], bits])


def check_alike(tensors: Iterable[Tensor], step: int, ranks: Ranks) -> None:
    """Check that all ranks have learned the same, bit for bit.

    Raises:
        TrainingError: a rank has other weights: equal gradients moved them differently.
    """
    if ranks.size == 1:
        return
    digests = ranks.texts(digest(tensors))
    for rank, other in enumerate(digests):
        if other != digests[0]:
            raise TrainingError(
                f"after step {step} rank {rank} has other weights than rank 0, expected the same "
                "bits; use devices of one kind and go on from the last checkpoint with --resume"
            )
