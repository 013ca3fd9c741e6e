"""Names, types and rows of a GGUF file, without its weights and its vocabulary."""

import struct
from pathlib import Path

import pytest
import torch

from qat.errors import CheckpointError
from qat.models import directory, gguf_header
from qat.models.gguf import read_rows
from qat.models.gguf_header import read_header

library = pytest.importorskip("gguf")
Q8_0 = library.GGMLQuantizationType.Q8_0


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = library.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_token_list(["a", "longer word", ""])
    writer.add_token_scores([0.0, 1.0, 2.0])
    writer.add_bool("test.flag", True)
    table = torch.arange(6 * 64).view(6, 64).float()
    blocks = library.quants.quantize(table.numpy(), Q8_0)
    writer.add_tensor("output_norm.weight", torch.ones(64).numpy())
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_header_is_that_of_the_library(file: Path) -> None:
    header = read_header(file)
    assert header.keys() == {"output_norm.weight", "token_embd.weight"}
    for tensor in library.GGUFReader(file).tensors:
        found = header[tensor.name]
        assert list(found.shape) == tensor.shape[::-1].tolist()
        assert (found.type, found.place) == (tensor.tensor_type.name, tensor.data_offset)
    assert header["token_embd.weight"].bits == 8.5


def test_the_header_is_parsed_once_until_the_file_changes(file: Path, monkeypatch) -> None:
    monkeypatch.setattr(directory, "SETTLED_S", 0.0)
    parsed, parse = [], gguf_header._header_in
    monkeypatch.setattr(
        gguf_header, "_header_in", lambda data: (parsed.append(len(data)), parse(data))[1]
    )
    for _ in range(2):
        gguf_header.check_gguf(file)
        assert read_header(file).keys() and gguf_header.read_metadata(file)
    assert len(parsed) == 1
    file.write_bytes(file.read_bytes()[:90])
    with pytest.raises(CheckpointError, match=r"model\.gguf is no whole GGUF file"):
        read_header(file)
    assert parsed[1:] == [90]


def test_rows_are_those_of_the_library(file: Path) -> None:
    whole = next(t for t in library.GGUFReader(file).tensors if t.name == "token_embd.weight")
    expected = torch.from_numpy(library.quants.dequantize(whole.data, Q8_0).copy())
    rows = range(1, 6, 2)
    assert torch.equal(
        read_rows(file, read_header(file)["token_embd.weight"], rows), expected[list(rows)]
    )


@pytest.mark.parametrize("length", [0, 3, 20, 90])
def test_a_file_that_ends_too_early_is_one_line(file: Path, length: int) -> None:
    cut = file.with_name("cut.gguf")
    cut.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError, match=r"cut\.gguf is no whole GGUF file"):
        read_header(cut)


def test_damages_are_one_line(file: Path) -> None:
    def name(text: bytes) -> bytes:
        return struct.pack("<Q", len(text)) + text

    content = file.read_bytes()
    key, kind = b"general.alignment", struct.pack("<I", 4)
    for harmed, said in (
        (content[:-80], r"expected token_embd.weight of shape \(6, 64\) in whole blocks of Q8_0"),
        (content.replace(struct.pack("<QQI", 64, 6, 8), struct.pack("<QQI", 64, 6, 99)), "type 99"),
        (
            content.replace(struct.pack("<QQI", 64, 6, 8), struct.pack("<QQI", 63, 6, 8)),
            "whole blo",
        ),
        (content.replace(name(b"token_embd.weight"), name(b"output_norm.weight")), "weight' twice"),
        (content.replace(key + kind + b"\x40", key + kind + b"\x41"), "an alignment of 65"),
        (content.replace(b"GGUF\3", b"GGUF\1"), "version 1"),
    ):
        assert harmed != content
        file.write_bytes(harmed)
        with pytest.raises(CheckpointError, match=said):
            read_header(file)
