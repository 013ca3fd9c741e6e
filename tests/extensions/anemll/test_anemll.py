"""Imported checkpoints of the reference system compute what its documented formulas say."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from legacy_case import (
    Parts,
    even_lut,
    first_parts,
    first_weight,
    legacy_state,
    lora_weight,
    parts_of,
    save_base,
    save_legacy,
    second_parts,
    second_weight,
)
from torch import Tensor
from transformers import PreTrainedModel

from qat.cli import run_verb
from qat.errors import CheckpointError, ConfigError
from qat.extensions.anemll.checkpoint import import_checkpoint
from qat.extensions.anemll.linear import Imported, import_linear, lora_as_stored
from qat.extensions.anemll.state import LegacySettings, LegacyState, read_state, state_file
from qat.models.load import load_model
from qat.nn.quant_linear import quant_linears
from qat.quant.lora import Lora
from qat.quant.weight import dequantize

IDS = torch.arange(40).view(2, 20) * 7 % 320
O, I = 12, 32


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    place = tmp_path_factory.mktemp("legacy") / "base"
    return place, save_base(place)


def imported(parts: Parts, version: int, **settings: object) -> Imported:
    legacy = LegacyState(version, {}, {}, LegacySettings(**settings))
    return import_linear("linear", dict(parts), legacy, tuple(parts["weight"].shape))


def assert_equal(found: Imported, expected: Tensor) -> None:
    """Check that the weights are equal within float32 rounding of the sum over ranks."""
    weight = dequantize(found.quantized)
    if found.lora is not None:
        weight = weight + found.lora.lora_out.double() @ found.lora.lora_in.double()
    assert (weight - expected).abs().max() <= 2e-6 * expected.abs().max()
    assert found.quantized.codebook.diff().ge(0).all()


@pytest.mark.parametrize("keep", [("_Q", "_indices"), ("_indices",), ("_Q",), ()], ids=str)
@pytest.mark.parametrize("entries", [4, 16])
def test_every_variant_of_the_codes(keep: tuple[str, ...], entries: int) -> None:
    parts = second_parts(torch.randn(O, I), entries=entries, keep=keep)
    found = imported(parts, 2)
    assert_equal(found, second_weight(parts))
    assert found.spec.num_levels == entries and found.spec.rank == 3 and found.spec.scale_bits == 32


@pytest.mark.parametrize("flag", [True, False])
def test_baked_scales(flag: bool) -> None:
    parts = second_parts(torch.randn(O, I))
    parts |= {"_scales_baked_flag": torch.tensor(1), "rank_magnitude": torch.ones(3)}
    parts |= {name: parts[name].half() for name in ("scale_A", "scale_B")}
    expected = second_weight(parts)
    if not flag:  # older files: gains of one say it
        del parts["_scales_baked_flag"]
    found = imported(parts, 2)
    assert_equal(found, expected)
    assert found.spec.scale_bits == 16  # they were in float16 already


def test_a_learned_lut() -> None:
    parts = second_parts(torch.randn(O, I), entries=16, keep=("_indices",))
    parts["_lut_raw_deltas"] = torch.randn(8)
    found = imported(parts, 2)
    assert_equal(found, second_weight(parts))
    assert not torch.equal(found.quantized.codebook, parts["lut"])


def test_values_that_left_the_lut() -> None:
    parts = second_parts(torch.randn(O, I), entries=16, keep=("_Q",))
    parts["_Q"] = parts["_Q"] * 0.77
    assert_equal(imported(parts, 2), second_weight(parts))
    parts["_Q"] = torch.randn(O, I)
    with pytest.raises(CheckpointError, match="holds 384 distinct values where its LUT has 16"):
        imported(parts, 2)


def test_a_lut_in_no_order_of_an_odd_size() -> None:
    parts = second_parts(torch.randn(O, I), entries=5, keep=("_indices",))
    parts["lut"] = torch.tensor([0.5, -1.0, 2.0, 0.0, -0.25])
    found = imported(parts, 2)
    assert_equal(found, second_weight(parts))
    assert found.spec.bits == 3


def test_settings_that_make_scales_positive() -> None:
    parts = second_parts(torch.randn(O, I))
    bent = {**parts, "scale_A": parts["scale_A"].abs(), "scale_B": parts["scale_B"].abs()}
    bent["rank_magnitude"] = torch.nn.functional.softplus(parts["rank_magnitude"])
    found = imported(parts, 2, is_positive=True, magnitude="softplus")
    assert_equal(found, second_weight(bent))


@pytest.mark.parametrize("entries", [4, 16])
@pytest.mark.parametrize("pad", [0, 16])
def test_version_1(entries: int, pad: int) -> None:
    parts = first_parts(torch.randn(O, I) * 0.2, entries=entries, pad=pad)
    found = imported(parts, 1)
    assert_equal(found, first_weight(parts))
    assert found.num_floored == 0 and found.spec.num_levels == entries


def test_version_1_where_scales_are_raised() -> None:
    parts = first_parts(torch.randn(O, I) * 0.2, shift=0.0)
    found = imported(parts, 1)
    expected = first_weight(parts)
    assert_equal(found, expected)
    assert found.num_floored == int((expected.abs() <= 1e-8).sum()) > 0
    assert found.spec.bits == 3  # four levels and zero


@pytest.mark.parametrize("group", [1, 8])
def test_version_1_with_a_scale_for_each_weight(group: int) -> None:
    parts = first_parts(torch.randn(O, I) * 0.2)
    del parts["scale_A"], parts["scale_B"]
    parts["full_scales"] = (torch.rand(O, 48 // group) + 0.1).repeat_interleave(group, 1)
    found = imported(parts, 1)
    assert torch.equal(dequantize(found.quantized), first_weight(parts))
    assert found.spec.group_size == group and found.spec.scale_bits == 32


@pytest.mark.parametrize("mode", ["lut", "baked"])
def test_snapped_weights_of_version_1(mode: str) -> None:
    parts = first_parts(torch.randn(O, I) * 0.2)
    expected = first_weight(parts)
    S = (parts["scale_A"] @ parts["scale_B"]).clamp(min=1e-8)
    parts["weight"] = expected if mode == "baked" else expected / S
    parts["weight"] = (
        parts["weight"]
        if mode == "baked"
        else even_lut(4)[(parts["weight"][..., None] - even_lut(4)).abs().argmin(-1)]
    )
    assert_equal(imported(parts, 1, snapped=mode), expected)
    if mode == "baked":
        parts["weight"] = parts["weight"].bfloat16()
        with pytest.raises(CheckpointError, match="baked weights are up to .* away from LUT"):
            imported(parts, 1, snapped=mode)


def test_baked_weights_of_terms_that_cancel_may_be_summed_in_another_order() -> None:
    parts = first_parts(torch.randn(O, I) * 0.2)
    large = torch.rand(O, 1) * 300, torch.rand(1, I) + 0.5
    parts["scale_A"] = torch.cat([large[0], parts["scale_A"], -large[0]], 1)
    parts["scale_B"] = torch.cat([large[1], parts["scale_B"], large[1]], 0)
    S = (parts["scale_A"].double() @ parts["scale_B"].double()).float()
    level = even_lut(4)[torch.randint(4, (O, I))]
    parts["weight"] = level * S
    apart = (level * (parts["scale_A"] @ parts["scale_B"]) - parts["weight"]).abs().max()
    assert apart > 2e-6 * parts["weight"].abs().max()  # more than one rounding of a weight
    assert imported(parts, 1, snapped="baked").quantized.indices.shape == (O, I)


@pytest.mark.parametrize("alpha", [None, 4.0, 3.0])
def test_a_lora_is_kept(alpha: float | None) -> None:
    parts = second_parts(torch.randn(O, I), keep=("_indices",))
    parts |= {"lora_A": torch.randn(2, I) * 0.02, "lora_B": torch.randn(O, 2) * 0.01}
    found = imported(parts, 2, lora_alpha=alpha)
    assert_equal(found, second_weight(parts) + lora_weight(parts, alpha or 2.0))
    assert found.lora.lora_in.shape[0] == 6  # float32 factors as sums of float16 ones
    assert all(torch.equal(factor, factor.half().float()) for factor in found.lora)


def test_a_lora_that_float16_holds_keeps_its_rank() -> None:
    lora = Lora(torch.randn(O, 2).half().float(), torch.randn(2, I).half().float())
    assert all(map(torch.equal, lora_as_stored(lora), lora))
    still = Lora(torch.zeros(O, 2), torch.randn(2, I))
    assert lora_as_stored(still).lora_in.shape == (2, I)


def with_weights(model: PreTrainedModel, state: dict, weight: Callable) -> Tensor:
    """The logits of the float model with the oracle's weights."""
    dense = {k: t for k, t in state.items() if k in model.state_dict()}
    for name in {key.rpartition(".")[0] for key in state if key.endswith(".lut")}:
        dense[f"{name}.weight"] = weight(parts_of(state, name)).float()
    with torch.no_grad():
        return torch.func.functional_call(model, dense, (IDS,)).logits


@pytest.mark.parametrize(
    ("make", "weight"), [(first_parts, first_weight), (second_parts, second_weight)]
)
def test_a_whole_checkpoint(
    make: Callable, weight: Callable, base: tuple[Path, PreTrainedModel], tmp_path: Path
) -> None:
    place, model = base
    state = legacy_state(model, make)
    path = save_legacy(tmp_path / "run", state)
    report = import_checkpoint(path.parent, str(place), tmp_path / "out")
    assert report.linears == 14 and report.version == (1 if make is first_parts else 2)
    assert sum(report.formats.values()) == 14
    student = load_model(str(tmp_path / "out"), device="cpu", dtype="fp32")
    with torch.no_grad():
        logits = student.model(IDS).logits
    assert (logits - with_weights(model, state, weight)).abs().max() <= 1e-5
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "out" / "import_report.json").read_text())["base"] == str(place)


def test_the_verb_a_head_of_its_own_and_a_state_dict_within(
    base: tuple[Path, PreTrainedModel], tmp_path: Path, capsys
) -> None:
    place, model = base
    state = legacy_state(model, second_parts)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    inside = {"model_state_dict": state, "config": {"version": "v2", "model_id": str(place)}}
    torch.save(inside, tmp_path / "whole.pt")
    flags = ["--from", "anemll", "--out", str(tmp_path / "out")]
    result = run_verb(["convert", str(tmp_path / "whole.pt"), *flags])
    assert (
        result["linears"] == 14
        and result["version"] == 2
        and "lut2 r3 s32" in capsys.readouterr().out
    )
    student = load_model(str(tmp_path / "out"), device="cpu").model
    assert not student.config.tie_word_embeddings
    assert torch.equal(student.lm_head.weight.float(), state["lm_head.weight"])
    assert len(quant_linears(student)) == 14


def test_settings_of_a_conversion_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="^to=q2a4 is given with --from, which keeps"):
        run_verb(["convert", "x.pt", "--from", "anemll", "--to", "q2a4", "--out", str(tmp_path)])
    with pytest.raises(ConfigError, match="^--eval is given with --from, which keeps"):
        run_verb(["convert", "x.pt", "--from", "anemll", "--eval", "--out", str(tmp_path)])


class Evil:
    def __reduce__(self) -> tuple:
        return print, ("code ran",)


def test_files_that_are_none(tmp_path: Path, capsys) -> None:
    def refused(content: object, message: str) -> None:
        torch.save(content, tmp_path / "x.pt")
        with pytest.raises(CheckpointError, match=message):
            read_state(tmp_path / "x.pt")

    weight = torch.randn(O, I)
    second = {f"a.{k}": t for k, t in second_parts(weight).items()}
    first = {f"b.{k}": t for k, t in first_parts(weight).items()}
    refused({"a.weight": weight}, "holds 1 tensors, none of them a scale_A")
    refused({"a._f_param": weight}, "oldest scheme")
    refused({"a.lora_A": weight, "a.lora_B": weight}, "holds LoRA factors alone")
    refused({**first, **second}, "mixes versions: a has rank_magnitude and b has none")
    refused({**second, "a.what": weight}, "a has a tensor what, which neither version knows")
    refused({**second, "a.A_lut": weight}, "a has tables for its scales")
    refused({k: t for k, t in second.items() if k != "a.lut"}, "a has no lut, expected all")
    refused({**second, "b._Q": weight}, "b._Q belongs to a quantized linear that has no scale_A")
    refused({**second, "a.lut": "text"}, "a.lut is a str, expected a plain tensor")
    refused({**second, "a.lut": torch.zeros(1).expand(2**40)}, "over too few bytes")
    refused([weight], "holds a list, expected a dictionary")
    refused({"a": Evil()}, r"without running code \(Unsupported ")
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"a": Evil()}, protocol=2))
    with pytest.raises(CheckpointError, match="without running code"):
        read_state(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(pickle.dumps({"a": 1}, protocol=4))
    with pytest.raises(CheckpointError, match="without running code \\(Unsupported operand"):
        read_state(tmp_path / "x.pt")
    assert "code ran" not in capsys.readouterr().out
    torch.save({"a": torch.arange(4000)}, tmp_path / "x.pt")
    whole = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(whole[:20000] + b"?" + whole[20001:])
    with pytest.raises(CheckpointError, match="x.pt is damaged: x/data/0 is not what was written"):
        read_state(tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(CheckpointError, match="no file of pickled tensors"):
        read_state(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("scale_A", torch.ones(O + 1, 3), r"scale_A has shape \(13, 3\), expected \(12, 3\)"),
        ("lut", torch.ones(1), "lut has 1 entries, expected 2 to 256"),
        ("_indices", torch.full((O, I), 4), "_indices holds torch.int64 from 4 to 4, expected"),
        ("rank_magnitude", torch.full((3,), torch.nan), "rank_magnitude holds NaN or infinity"),
        ("scale_B", torch.ones(3, I).int(), "scale_B is torch.int32, expected floating point"),
        ("_lut_raw_deltas", torch.ones(8), "learned LUT of 4 entries, expected 16"),
        ("_scales_baked_flag", torch.ones(2), "_scales_baked_flag has 2 values, expected one"),
    ],
)
def test_tensors_that_cannot_be(part: str, value: Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        imported({**second_parts(torch.randn(O, I)), part: value}, 2)


def test_what_does_not_fit_the_model(base: tuple[Path, PreTrainedModel], tmp_path: Path) -> None:
    place, model = base

    def refused(state: dict, message: str) -> None:
        path = save_legacy(tmp_path / "run", state)
        with pytest.raises(CheckpointError, match=message):
            import_checkpoint(path, str(place), tmp_path / "out")
        assert not (tmp_path / "out").exists()

    state = legacy_state(model, second_parts)
    refused(
        {k: t for k, t in state.items() if k != "model.norm.weight"}, "misses model.norm.weight"
    )
    refused({**state, "model.more.weight": torch.ones(1)}, "has an unknown model.more.weight")
    refused({**state, "model.norm.weight": torch.ones(3)}, r"has model.norm.weight of shape \(3,\)")
    other = {f"other.{k}": t for k, t in second_parts(torch.randn(O, I)).items()}
    refused({**state, **other}, "quantizes other, but Qwen3ForCausalLM has no linear layer")
    path = save_legacy(tmp_path / "run", state)
    with pytest.raises(CheckpointError, match="names model_id='nowhere', which cannot be opened"):
        import_checkpoint(path, None, tmp_path / "out")
    (path.parent / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no config.json beside it .* add --base MODEL"):
        import_checkpoint(path, None, tmp_path / "out")


def test_which_file_of_a_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist, expected a .pt file"):
        state_file(tmp_path / "none")
    with pytest.raises(CheckpointError, match="holds 0 .pt files"):
        state_file(tmp_path)
    for name in ("a.pt", "b.pt", "indices.pt"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=r"holds 2 .pt files \(a.pt, b.pt\)"):
        state_file(tmp_path)
    (tmp_path / "model_state_dict.pt").touch()
    assert state_file(tmp_path).name == "model_state_dict.pt"
    assert state_file(tmp_path / "a.pt").name == "a.pt"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model_id", 3, "model_id='3', expected str"),
        ("lora_alpha", "x", "lora_alpha='x', expected a number"),
        ("snapped_mode", "half", "snapped_mode='half', expected one of lut, baked"),
        ("magnitude_activation", [], "magnitude_activation=.*expected one of identity"),
        ("lut_max_abs", float("nan"), "lut_max_abs='nan', expected a number"),
    ],
)
def test_settings_that_cannot_be(key: str, value: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=f"config says {message}"):
        LegacySettings.read({key: value}, "config")


def test_both_writers_of_settings() -> None:
    first = {"model_id": "m", "snapped": True, "snap_bake_scales": None, "lut_size": 4}
    assert LegacySettings.read(first, "").snapped == "lut"
    assert LegacySettings.read({**first, "snap_bake_scales": True}, "").snapped == "baked"
    second = {"version": "v2", "lora_r": 0, "lora_alpha": 0, "recovery_alpha": 8}
    assert LegacySettings.read(second, "").lora_alpha == 8
