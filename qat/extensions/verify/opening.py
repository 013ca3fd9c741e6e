"""Opening of a model in whatever form it is stored."""

from dataclasses import replace
from pathlib import Path

from qat.errors import CheckpointError
from qat.extensions.lab.verbs import gguf_file
from qat.extensions.verify.facts import Side
from qat.extensions.verify.reading import MLX, open_any, open_gguf, open_mlx, with_model
from qat.models.directory import GGUF, resolve
from qat.models.load import load_tokenizer
from qat.models.opening import read_table

ONNX = ".onnx"
PROGRAMS = (".mlpackage", ".aimodel", ".pte", ".tflite", ".xml")
"""Suffixes of what other targets write, which their own libraries alone open."""


def located(source: str) -> Path:
    """Return the place of a model: a directory, a file, or a hub id; nothing of it is read.

    Raises:
        CheckpointError: there is no model.
        ConfigError: a directory holds several GGUF files.
    """
    path = Path(source)
    if path.suffix == ONNX and path.is_file():
        return path
    if path.is_dir() and any(path.glob(f"*{ONNX}")):
        return path
    if path.is_dir() and not (path / "config.json").is_file() and any(path.rglob(f"*{GGUF}")):
        return gguf_file(path)
    return Path(resolve(source))


def open_side(source: str, device: str = "cpu") -> Side:
    """Open a model: a float or quantized directory, a run, a GGUF file, MLX, ONNX, or a hub id.

    Raises:
        CheckpointError: there is no model, or it is damaged or of a kind that is not read.
    """
    place = located(source)
    if place.suffix == ONNX or any(place.glob(f"*{ONNX}")):
        from qat.extensions.verify.onnx import open_onnx  # the others need no reader of ONNX

        return open_onnx(place)
    if place.suffix == GGUF and place.is_file():
        return with_model(open_gguf(place), device)
    if (place / "config.json").is_file() and MLX in read_table(place / "config.json"):
        return with_model(open_mlx(place), device)
    try:
        return open_any(source, place, device)
    except CheckpointError:
        program = next((each.name for each in place.glob("*") if each.suffix in PROGRAMS), None)
        if program is None:
            raise
        raise CheckpointError(
            f"{source} holds {program}, a program whose weights are not read, expected GGUF, MLX, "
            "ONNX or a model of transformers; 'qat export' compared it when it was written"
        ) from None


def open_reference(source: str, device: str = "cpu") -> Side:
    """Open a model that others are compared with, with its tokenizer.

    Raises:
        CheckpointError: see `open_side`; or it lacks a tokenizer, a weight, or finite numbers.
    """
    side = open_side(source, device)
    if side.model is None:
        raise CheckpointError(
            f"{source} ({side.form}) makes no model in transformers, expected a whole one to "
            "compare with; name the model that was exported"
        )
    return side if side.tokenizer else replace(side, tokenizer=load_tokenizer(source))
