"""A GGUF file is converted once, and what was kept of it opens as the file does."""

import json
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import gguf
import pytest
import torch
from covering import covering
from gguf_case import write_gguf
from safetensors import safe_open
from tiny import tiny_tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qat.errors import CheckpointError
from qat.extensions.targets.gguf import pre_tokenizer
from qat.models import gguf_cache
from qat.models.load import load_config, load_model, load_tokenizer
from qat.models.opening import Opening

TEXTS = ("The quick brown fox.", "  two  spaces\n\tand a tab", "na\u00efve caf\u00e9 \u4f60\u597d")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_cache, "GGUF_CACHE", tmp_path / "kept")
    return tmp_path / "kept"


@pytest.fixture
def dequantized(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The tensors that were dequantized until now."""
    from qat.models import gguf as reader

    own, found = reader.dequantize, []
    monkeypatch.setattr(reader, "dequantize", lambda *of: (found.append(of[1]), own(*of))[1])
    return found


def weights(path: Path, dtype: str = "fp32") -> dict[str, Tensor]:
    state = load_model(str(path), device="cpu", dtype=dtype).model.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}  # not a view of the file


def plain(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the tensors that transformers alone reads from the file."""
    with Opening(path, "a model"):
        return AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=dtype
        ).state_dict()


def is_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    same = (
        torch.equal(one[name], other[name]) and one[name].dtype == other[name].dtype
        for name in other
    )
    return one.keys() == other.keys() and all(same)


def entries(root: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[2] for path in root.iterdir())


@pytest.mark.parametrize("kind", ["Q5_0", "Q8_0", "F16", "BF16", "F32"])
def test_the_second_opening_dequantizes_nothing_and_is_equal(
    kind: str, root: Path, tmp_path: Path, dequantized: list[object]
) -> None:
    path = write_gguf(tmp_path / "model.gguf", kind)
    first = weights(path)
    assert len(dequantized) == len(first) and entries(root) == ["config", "float32"]
    second = weights(path)
    assert len(dequantized) == len(first)
    assert is_equal(first, plain(path)) and is_equal(second, first)
    assert not torch.equal(first["lm_head.weight"], first["model.embed_tokens.weight"])


def test_tokens_are_those_of_the_file(root: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    with Opening(path, "a tokenizer"):
        own = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for _ in range(2):
        kept = load_tokenizer(str(path))
        assert kept.backend_tokenizer.to_str() == own.backend_tokenizer.to_str()
        assert kept.special_tokens_map == own.special_tokens_map
        assert kept.chat_template == own.chat_template == tiny_tokenizer().chat_template
        assert kept.name_or_path == str(path)
        assert kept.clean_up_tokenization_spaces is False
        for text in TEXTS:
            assert kept(text).input_ids == own(text).input_ids
    assert entries(root) == ["tokenizer"]
    path = write_gguf(tmp_path / "digits.gguf", splits_digits=True)
    for _ in range(2):
        backend = load_tokenizer(str(path)).backend_tokenizer
        assert pre_tokenizer(json.loads(backend.to_str())) == "smollm"
        parts = backend.pre_tokenizer.pre_tokenize_str("a 12")
        assert [part for part, _ in parts] == ["a", "\u0120", "1", "2"]


def test_the_configuration_is_that_of_the_file(root: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    with Opening(path, "a configuration"):
        own = AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict()
    assert own.pop("_name_or_path", None) is not None
    for _ in range(2):
        found = load_config(str(path)).to_dict()
        found.pop("_name_or_path", None)
        assert found == own
    assert entries(root) == ["config"]


@pytest.mark.parametrize("kind", ["Q5_0", "F16", "BF16"])
def test_every_dtype_is_rounded_from_float32(
    kind: str,
    root: Path,
    tmp_path: Path,
    dequantized: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = write_gguf(tmp_path / "model.gguf", kind)
    expected = plain(path, torch.bfloat16)
    with monkeypatch.context() as large:
        large.setattr(gguf_cache, "SMALL_BYTES", 0)
        assert is_equal(weights(path, "bf16"), expected)
    assert entries(root) == ["bfloat16", "config"]
    shutil.rmtree(root)
    assert is_equal(weights(path, "bf16"), expected) and entries(root) == ["config", "float32"]
    count = len(dequantized)  # a small file is converted once, whatever dtype asks for it first
    assert is_equal(weights(path), plain(path)) and len(dequantized) == count
    assert is_equal(weights(path, "bf16"), expected)


@pytest.mark.parametrize(
    ("kind", "dtype"), [("Q5_0", "F32"), ("F16", "F16"), ("BF16", "BF16"), ("F32", "F32")]
)
def test_nothing_is_kept_wider_than_the_file_has_it(kind: str, dtype: str, root, tmp_path) -> None:
    weights(write_gguf(tmp_path / "model.gguf", kind))
    (entry,) = root.glob("*-float32")
    with safe_open(entry / "model.safetensors", "pt") as file:
        assert file.get_slice("model.layers.0.mlp.up_proj.weight").get_dtype() == dtype
        assert file.get_slice("lm_head.weight").get_dtype() == "F32"


def test_another_file_of_the_same_name_size_and_time_is_another(root: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    before, size, then = weights(path), path.stat().st_size, path.stat().st_mtime_ns
    write_gguf(path, seed=1)
    os.utime(path, ns=(then, then))
    assert path.stat().st_size == size
    after = weights(path)
    assert not torch.equal(after["lm_head.weight"], before["lm_head.weight"])
    assert is_equal(after, plain(path))
    assert entries(root) == ["config", "config", "float32", "float32"]


def test_a_file_that_changes_while_it_is_converted_is_not_kept(root: Path, tmp_path: Path) -> None:
    path, other = write_gguf(tmp_path / "model.gguf"), write_gguf(tmp_path / "other.gguf", seed=1)
    first = path.read_bytes()

    def read(place: str, file: dict[str, str], **named: object) -> object:
        path.write_bytes(other.read_bytes())
        with Opening(path, "a model"):
            return AutoModelForCausalLM.from_pretrained(place, **file, **named)

    gguf_cache.opened(str(path), gguf_cache.Weights(torch.float32, read), read)
    assert entries(root) == []
    path.write_bytes(first)
    assert is_equal(weights(path), plain(path))


@pytest.mark.parametrize(
    ("damage", "part"),
    covering(
        ["cut", "changed", "gone", "unlisted", "one more"], ["float32", "tokenizer", "config"]
    ),
)
def test_a_damaged_entry_is_made_again(part: str, damage: str, root: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    before, tokens = weights(path), load_tokenizer(str(path)).get_vocab()
    (entry,) = root.glob(f"*-{part}")
    file = next(each for each in entry.iterdir() if each.name.startswith(("model.", part)))
    content = file.read_bytes()
    if damage == "unlisted":
        (entry / "checksums.json").unlink()
    elif damage == "gone":
        file.unlink()
    elif damage == "one more":
        (entry / "generation_config.json").write_text('{"eos_token_id": 5}')
    else:
        end = len(content) // 2
        file.write_bytes(content[:end] + (b"" if damage == "cut" else b"\0" + content[end + 1 :]))
    assert is_equal(weights(path), before) and load_tokenizer(str(path)).get_vocab() == tokens
    assert file.read_bytes() == content and (entry / "checksums.json").is_file()
    assert not (entry / "generation_config.json").exists()


def test_two_at_once_convert_once(root: Path, tmp_path: Path, dequantized: list[object]) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    found = []

    def read(place: str, file: dict[str, str], **named: object) -> object:
        time.sleep(0.2)
        with Opening(path, "a model"):
            return AutoModelForCausalLM.from_pretrained(place, **file, **named)

    part = gguf_cache.Weights(torch.float32, read)
    threads = [
        threading.Thread(target=lambda: found.append(gguf_cache._entry(path, part))) for _ in "ab"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] and len(dequantized) == len(gguf.GGUFReader(path).tensors)
    assert entries(root) == ["float32"]


def test_an_entry_that_goes_while_it_is_opened_is_not_missed(root: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    asked = []

    def read(place: str, file: dict[str, str]) -> str:
        asked.append((place, file))
        shutil.rmtree(root, ignore_errors=True)
        AutoConfig.from_pretrained(place, **file, local_files_only=True)
        return place

    assert gguf_cache.opened(str(path), gguf_cache.Config(), read) == str(tmp_path)
    assert [file for _, file in asked] == [{}, {"gguf_file": "model.gguf"}]


def test_the_longest_unused_make_room(root: Path, tmp_path: Path, monkeypatch) -> None:
    paths = [write_gguf(tmp_path / f"{n}.gguf", seed=n) for n in range(3)]
    weights(paths[0])
    size = sum(file.stat().st_size for file in root.glob("*-float32/*"))
    monkeypatch.setattr(gguf_cache, "BUDGET_BYTES", int(2.7 * size))
    weights(paths[1])
    for age, path in ((3000, paths[1]), (2000, paths[0])):
        for part in ("config", "float32"):
            at = time.time() - age
            digest = gguf_cache.settled_sha256(path)
            os.utime(next(root.glob(f"{digest}-*-{part}")), (at, at))
    weights(paths[2])
    kept = {entry.name[:64] for entry in root.glob("*-float32")}
    assert kept == {gguf_cache.settled_sha256(path) for path in (paths[0], paths[2])}
    assert sum(file.stat().st_size for file in root.glob("*/*")) <= gguf_cache.BUDGET_BYTES
    assert entries(root) == [*["config"] * 2, *["float32"] * 2]


def test_what_does_not_fit_is_read_each_time(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dequantized: list[object],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(gguf_cache, "BUDGET_BYTES", 50_000)
    path = write_gguf(tmp_path / "model.gguf")
    first = weights(path)
    assert is_equal(first, plain(path)) and is_equal(weights(path), first)
    assert len(dequantized) == 2 * len(first) and entries(root) == ["config"]
    assert "do not fit" in caplog.text and "converted each time" in caplog.text


def test_what_was_used_a_moment_ago_makes_no_room(root: Path, tmp_path: Path, monkeypatch) -> None:
    weights(write_gguf(tmp_path / "a.gguf"))
    size = sum(file.stat().st_size for file in root.glob("*/*"))
    monkeypatch.setattr(gguf_cache, "BUDGET_BYTES", int(1.5 * size))
    path = write_gguf(tmp_path / "b.gguf", seed=1)
    assert is_equal(weights(path), plain(path))
    assert entries(root) == ["config", "config", "float32"]


def test_what_a_kill_left_goes_after_a_day(root: Path, tmp_path: Path) -> None:
    for name, age in (("old", 2 * 86400), ("new", 60)):
        left = root / f".{name}.partial-abcdefgh"
        left.mkdir(parents=True)
        (left / "model.safetensors").write_bytes(b"half")
        os.utime(left, (time.time() - age,) * 2)
    load_config(str(write_gguf(tmp_path / "model.gguf")))
    assert not (root / ".old.partial-abcdefgh").exists()
    assert (root / ".new.partial-abcdefgh").exists()


@pytest.mark.parametrize("fault", ["a file in the way", "a full disk", "no home"])
def test_a_cache_that_cannot_be_written_stops_nobody(
    fault: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    path = write_gguf(tmp_path / "model.gguf")
    if fault == "a full disk":

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(gguf_cache, "write_checksums", full)
    elif fault == "no home":
        monkeypatch.setattr(gguf_cache, "GGUF_CACHE", Path("~no-user-of-that-name/kept"))
    else:
        root.write_text("")
    assert is_equal(weights(path), plain(path))
    assert load_tokenizer(str(path))(TEXTS[0]) == tiny_tokenizer()(TEXTS[0])
    assert "converted each time" in caplog.text
    assert fault != "a full disk" or entries(root) == []


def test_a_file_without_a_tokenizer_still_opens(root: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", has_tokenizer=False)
    assert is_equal(weights(path), plain(path)) and entries(root) == ["config", "float32"]


def test_what_is_opened_is_called_by_the_file(root: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    for _ in range(2):
        model = load_model(str(path), device="cpu").model
        assert model.name_or_path == model.config.name_or_path == str(path)
        assert not hasattr(model.config, "quantization_config") and model.hf_quantizer is None
        assert str(root) not in str(model.config.to_dict())


def test_a_file_that_lacks_a_tensor_leaves_no_entry(root: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up", b"blk.9.ffn_up"))
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match="misses 1 tensors .such as model.layers.1.mlp.up"
        ):
            weights(path)
    assert entries(root) == ["config"]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux says what is mapped")
def test_a_model_does_not_live_in_a_file_that_may_go(root: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    models = [
        load_model(str(path), device="cpu", dtype=dtype) for dtype in ("fp32", "fp32", "bf16")
    ]
    assert str(root) not in Path("/proc/self/maps").read_text()
    assert len(models) == 3 and entries(root) == ["config", "float32"]
