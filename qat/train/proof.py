"""Proof that a run's numbers are numbers, and that a checkpoint holds what was meant.

A quantizer gives NaN a level like any other weight, so a student whose latent weights are NaN has a
finite loss and finite gradients: only a look at what learns and at what moves it tells. A
checkpoint is compared with memory as it is written, and hashed ever after.
"""

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from qat.errors import CheckpointError
from qat.files import sha256_file, sync
from qat.logs import STATE_TENSORS

STATE = "trainer/state.json"
MANIFEST = "trainer/manifest.json"
FORMAT = 1
NEEDED = ("config.json", STATE, STATE_TENSORS)
"""Files that no checkpoint of a run lacks, beside those of its weights."""


def trouble(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """`()` float32 on `device`: 0, or NaN where a value there is NaN or infinite.

    Reads each tensor once and does not wait. Integers, and tensors elsewhere, are left out.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in {id(tensor): tensor.detach() for tensor in tensors.values()}.values():
        if tensor.is_floating_point() and tensor.device == device and tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    # a sum keeps NaN and infinity on every device, which a maximum need not
    whole = torch.zeros((), device=device)
    for dtype, found in by_dtype.items():
        sums = torch._foreach_norm(found, 1, dtype=torch.promote_types(dtype, torch.float32))
        whole = whole + (0.0 * torch.stack(sums)).sum().float()
    return whole


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """The first tensor with NaN or infinity, and how many it holds; None where there is none."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and trouble({name: tensor}, tensor.device).isnan():
            count = (~tensor.detach().isfinite()).sum().item()
            return f"{name}: {count:,} of {tensor.numel():,} values are NaN or infinite"
    return None


def prove(directory: Path, *written: dict[str, Tensor]) -> None:
    """Compare each tensor file in `directory` with the tensors in memory, then list all hashes.

    The files are read back from the disk, not from what the system remembers of writing them. A
    file is hashed while it is compared.

    Raises:
        CheckpointError: a file holds something else, or a tensor holds NaN or infinity.
    """
    meant = {name: tensor for tensors in written for name, tensor in tensors.items()}
    if which := not_finite(meant):
        raise CheckpointError(
            f"{which}, expected numbers to save; lower --lr and its kin, or --clip-grad-norm, and "
            "go on from an older checkpoint"
        )
    of_tensors = list(directory.rglob("*.safetensors"))
    for path in of_tensors:
        _forget_pages(path)
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    with ThreadPoolExecutor(2 * max(1, len(of_tensors))) as threads:
        comparisons = [threads.submit(_compare, path, meant) for path in of_tensors]
        hashes = list(threads.map(sha256_file, files))
        for comparison in comparisons:
            comparison.result()
    listed = {
        path.relative_to(directory).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(files, hashes, strict=True)
    }
    manifest = {"format": FORMAT, "files": listed}
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def problem(checkpoint: Path, *, is_student: bool = False) -> str | None:
    """What is wrong with a run's checkpoint, in a few words; None where nothing is.

    One whose bytes are as they were written, but hold NaN, is wrong too.

    One that was written before there were manifests is looked at by its trainer's state only. Of
    one that is wanted as a student alone the tensors of the trainer's state may be missing.
    """
    try:
        if not checkpoint.is_dir():
            return "it is not there"
        if (checkpoint / MANIFEST).exists():
            found = _mismatch(checkpoint, is_student=is_student)
            if found is not None:
                return found
        step = read_state(checkpoint)["step"]
        state = [] if is_student else [checkpoint / STATE_TENSORS]
        for path in [*sorted(checkpoint.glob("*.safetensors")), *state]:
            with safe_open(path, framework="pt") as file:
                told = (not_finite({name: file.get_tensor(name)}) for name in file.keys())
                if which := next(filter(None, told), None):
                    return f"{path.relative_to(checkpoint).as_posix()}: {which}"
        is_named_so = checkpoint.name == f"step-{step:06d}"
        return None if is_named_so else f"{STATE}: it is of step {step}"
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        return " ".join(str(error).split())


def is_all_ours(checkpoint: Path) -> bool:
    """Whether every file in a checkpoint is one that its run wrote, and may delete."""
    try:
        listed = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        listed = []
    files = (path for path in checkpoint.rglob("*") if path.is_symlink() or not path.is_dir())
    return {path.relative_to(checkpoint).as_posix() for path in files} <= {MANIFEST, *listed}


def read_state(checkpoint: Path) -> dict:
    """The facts beside a checkpoint's tensors: step, best and of what run it is.

    Raises:
        ValueError: they are not what a run writes.
        OSError: they cannot be read.
    """
    state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    if not isinstance(state, dict) or type(state.get("step")) is not int:
        raise ValueError(f"{STATE}: no step")
    if not isinstance(state.get("best"), float | int):
        raise ValueError(f"{STATE}: no best score")
    if state.get("format", FORMAT) != FORMAT:
        raise ValueError(f"{STATE}: format {state['format']!r}")
    return state


def _mismatch(checkpoint: Path, *, is_student: bool) -> str | None:
    """The first file that is not as the manifest lists it."""
    manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        return f"{MANIFEST}: unknown format"
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(v, dict) for v in files.values()):
        return f"{MANIFEST}: no table of files"
    there = {p.relative_to(checkpoint).as_posix() for p in checkpoint.rglob("*") if p.is_file()}
    unlisted = {n for n in there if n.endswith((".json", ".safetensors"))} - files.keys()
    for name in (*NEEDED, *sorted(unlisted - {MANIFEST})):
        if name not in files:
            return f"{MANIFEST}: does not list {name}"
    for name, listed in files.items():
        path = checkpoint / name
        if is_student and name == STATE_TENSORS:
            continue
        if name not in there:
            return f"{name}: missing"
        if path.stat().st_size != listed.get("bytes"):
            return f"{name}: {path.stat().st_size} bytes instead of {listed.get('bytes')}"
        if sha256_file(path) != listed.get("sha256"):
            return f"{name}: SHA-256 differs"
    return None


def _forget_pages(path: Path) -> None:
    """Have the next read of a file come from the disk, where the system lets itself be told."""
    sync(path)
    if hasattr(os, "posix_fadvise"):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _compare(path: Path, meant: dict[str, Tensor]) -> None:
    # not by safe_open: safetensors 0.8.0 keeps 64 bytes of every tensor that it reads, for ever
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(header_bytes))
        except ValueError:
            raise _reads_otherwise(path, "its header") from None
        for name in header.keys() & meant.keys():
            begin, end = header[name]["data_offsets"]
            file.seek(8 + header_bytes + begin)
            if not _is_same(file.read(end - begin), header[name]["shape"], meant[name]):
                raise _reads_otherwise(path, name)


def _reads_otherwise(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name}: {what} reads otherwise than it was written, expected the same bytes; the "
        "disk or the memory fails: choose another --out or machine"
    )


def _is_same(read: bytes, shape: list[int], tensor: Tensor) -> bool:
    """Whether these are the tensor's shape and its bytes, NaN or not."""
    octets = tensor.detach().flatten().view(torch.uint8).numpy()
    return shape == [*tensor.shape] and np.array_equal(np.frombuffer(read, np.uint8), octets)
