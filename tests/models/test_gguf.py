"""GGUF files are read quickly, and as the package `gguf` reads them, to the bit."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from covering import covering
from gguf_case import write_gguf
from transformers.modeling_gguf_pytorch_utils import _gguf_parse_value

from qat.models.gguf import dequantize, open_gguf, quick_gguf
from qat.models.gguf_header import teach_q2_0

teach_q2_0()
KINDS = sorted(gguf.quants._type_traits, key=lambda kind: kind.name)


@pytest.mark.parametrize(("kind", "chunk"), covering(KINDS, [1, 2**11, 2**18]))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random bytes give infinite scales
def test_blocks_are_dequantized_to_the_same_bits(kind, chunk, monkeypatch) -> None:
    monkeypatch.setattr("qat.models.gguf.CHUNK_WEIGHTS", chunk)
    monkeypatch.setattr("qat.models.gguf.cores", lambda: 3)
    _, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(0).integers(0, 256, (3, 7, 2 * size), np.uint8)
    ours, theirs = dequantize(blocks, kind), gguf.quants.dequantize(blocks, kind)
    assert ours.shape == theirs.shape
    assert np.array_equal(ours.view(np.uint32), theirs.view(np.uint32))


def test_metadata_is_what_gguf_reads(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        mine = ours.fields[name]
        assert mine.types == field.types and len(mine.data) == len(field.data)
        for one, other in zip(mine.data, field.data, strict=True):
            parsed = _gguf_parse_value(mine.parts[one], mine.types)
            assert parsed == _gguf_parse_value(field.parts[other], field.types), name
    assert [(t.name, t.data_offset, *t.shape) for t in ours.tensors] == [
        (t.name, t.data_offset, *t.shape) for t in theirs.tensors
    ]


def test_empty_arrays_and_arrays_of_numbers(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "qwen3")
    writer.add_array("an.empty", [])
    writer.add_array("some.floats", [0.1, -2.5])
    writer.add_array("some.flags", [True, False])
    writer.add_array("some.words", ["", "\u2581of"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    fields = open_gguf(tmp_path / "a.gguf").fields
    theirs = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert [bytes(fields["some.words"].parts[i]).decode() for i in fields["some.words"].data] == [
        "",
        "\u2581of",
    ]
    for name in ("some.floats", "some.flags"):
        found = [fields[name].parts[i][0] for i in fields[name].data]
        assert found == [theirs[name].parts[i][0] for i in theirs[name].data]


def test_a_file_that_ends_in_an_array_fails_as_it_does_in_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"tokenizer.ggml.tokens") + 1000])
    with pytest.raises((IndexError, ValueError)) as theirs:
        gguf.GGUFReader(path)
    with pytest.raises(theirs.type) as ours:
        open_gguf(path)
    assert str(ours.value) == str(theirs.value)


def test_what_was_lent_is_taken_back(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    own = gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map
    with pytest.raises(KeyError), quick_gguf(path):
        assert gguf.GGUFReader is not own[0] and gguf.dequantize is not own[1]
        raise KeyError
    assert (gguf.GGUFReader, gguf.dequantize, gguf.get_tensor_name_map) == own
