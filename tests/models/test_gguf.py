"""GGUF files are read quickly, and as the package `gguf` reads them, to the bit."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from covering import covering
from gguf_case import write_gguf
from transformers.modeling_gguf_pytorch_utils import _gguf_parse_value

from qat.models.gguf import GgufFile, dequantize, quick_gguf


def is_dequantized(kind: gguf.GGMLQuantizationType) -> bool:
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


KINDS = [kind.name for kind in gguf.GGMLQuantizationType if is_dequantized(kind)]


@pytest.mark.parametrize(("kind", "chunk"), covering(KINDS, [1, 2**11, 2**18]))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes give infinite scales
def test_blocks_are_dequantized_to_the_same_bits(kind, chunk, monkeypatch) -> None:
    monkeypatch.setattr("qat.models.gguf.CHUNK_WEIGHTS", chunk)
    monkeypatch.setattr("qat.models.gguf.cores", lambda: 3)
    number = gguf.GGMLQuantizationType[kind]
    _, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 256, (3, 7, 2 * size), np.uint8)
    ours, theirs = dequantize(blocks, kind), gguf.quants.dequantize(blocks, number)
    assert ours.shape == theirs.shape
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def values(reader: object, name: str) -> list[object]:
    """Return a field as transformers parses it."""
    field = reader.fields[name]
    return [_gguf_parse_value(field.parts[place], field.types) for place in field.data]


def test_metadata_and_tensors_are_those_of_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    ours, theirs = GgufFile(path), gguf.GGUFReader(path)
    assert list(ours.fields) == [name for name in theirs.fields if not name.startswith("GGUF.")]
    for name, field in ours.fields.items():
        assert field.types == theirs.fields[name].types
        assert values(ours, name) == values(theirs, name), name
    for one, other in zip(ours.tensors, theirs.tensors, strict=True):
        assert (one.name, one.tensor_type) == (other.name, other.tensor_type.name)
        assert np.array_equal(one.data, other.data.view(np.uint8))


def test_empty_arrays_and_arrays_of_numbers(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen3")
    writer.add_array("an.empty", [])
    writer.add_array("some.floats", [0.1, -2.5])
    writer.add_array("some.flags", [True, False])
    writer.add_array("some.words", ["", "\u2581of"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    ours, theirs = GgufFile(tmp_path / "a.gguf"), gguf.GGUFReader(tmp_path / "a.gguf")
    for name in ours.fields:
        assert values(ours, name) == values(theirs, name)
    assert values(ours, "some.words") == ["", "\u2581of"]


def test_what_was_lent_is_taken_back(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    own = gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map
    with pytest.raises(KeyError), quick_gguf(path):
        assert gguf.GGUFReader is not own[0] and gguf.dequantize is not own[1]
        raise KeyError
    assert (gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map) == own
