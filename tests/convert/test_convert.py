"""The conversion of a model directory: sources, plans, calibration, and bad input."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from cache_case import build, texts, without_split
from quantized import SPECS, tiny_quantized
from safetensors.torch import load_file
from tiny import save_tiny, tiny_tokenizer

from qat.backend.base import Backend
from qat.convert import calibration_data
from qat.convert.calibrate import TokenBatch
from qat.convert.calibration_data import BATCH, calibration_batches
from qat.convert.checkpoint import PLAN_NAME, convert_checkpoint
from qat.convert.config import REPORT_NAME, ConvertConfig, read_kv, read_plan, split_kv
from qat.convert.quantize import quantize_model
from qat.convert.tables import round_float_tables
from qat.data.reader import TeacherCache
from qat.data.sources import DataSource, Sourced
from qat.errors import CacheError, ConfigError, DataError
from qat.models.attention import kv_spec
from qat.models.checkpoint import load_checkpoint, save_checkpoint
from qat.models.load import load_model, load_tokenizer
from qat.nn.quant_linear import quant_linears
from qat.nn.swap import table_names
from qat.quant.spec import PRESETS, KvSpec, by_group

IDS = torch.arange(12).view(2, 6)
MLP_PLAN = """
name = "mlp only"
[[rules]]
pattern = "*.down_proj"
[[rules]]
pattern = "*.mlp.*"
spec = { bits = 2, codebook = "int", group_size = 16 }
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model, the same at four bits, a text, and a cache of the same tokenizer."""
    place = tmp_path_factory.mktemp("convert")
    save_tiny(place / "float", initializer_range=0.2)
    save_checkpoint(tiny_quantized("qwen3", SPECS["lut4"]), tiny_tokenizer(), place / "four")
    (place / "text.txt").write_text("\n\n".join(texts(60)), encoding="utf-8")
    (place / "short.txt").write_text("the cat sat", encoding="utf-8")
    (place / "mlp.toml").write_text(MLP_PLAN)
    build(place / "cache")
    build(place / "foreign", tokenizer=tiny_tokenizer(265))
    without_split(place / "held", "train")
    return place


def config(place: Path, **values: object) -> ConvertConfig:
    """Settings that quantize linears alone; tests/convert/test_source_tables.py is about tables."""
    defaults = {"to": str(place / "mlp.toml"), "device": "cpu", "calibration_length": 32}
    defaults["embedding_bits"] = 16
    return ConvertConfig(**{**defaults, **values})


def test_a_float_model_becomes_a_packed_checkpoint(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = convert_checkpoint(str(place / "float"), config(place), out)
    expected = load_model(str(place / "float"), device="cpu", dtype="fp32")
    round_float_tables(expected.model, read_plan(config(place)))
    quantize_model(expected, read_plan(config(place)))
    loaded = load_checkpoint(out)
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, expected.model(IDS).logits)
    assert load_tokenizer(str(out)).get_vocab() == tiny_tokenizer().get_vocab()
    assert len(quant_linears(loaded)) == len(report.modules) == 4
    assert report.plan == "mlp only"


def test_the_report_lies_beside_the_tensors(place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = str(place / "float")
    found = convert_checkpoint(source, config(place, calibration=str(place / "text.txt")), out)
    report = json.loads((out / REPORT_NAME).read_text())
    assert report["source"] == source and report["plan"] == "mlp only" and report["kept"] == 0
    assert report["bits_per_weight"] == found.bits_per_weight and report["seconds"] > 0
    drawn = {"data": str(place / "text.txt"), "seed": 0, "sequences": 35, "tokens": 35 * 32}
    assert report["calibration"] == drawn
    assert [m["name"] for m in report["modules"]] == [m.name for m in found.modules]
    keys = {"name", "bits", "vector_size", "codebook", "scale", "group_size"}
    keys |= {"rank", "scale_bits", "relative_error", "weighted_error", "bits_per_weight", "seconds"}
    keys |= {"activation"}
    assert all(module.keys() == keys for module in report["modules"])
    assert all(0 < m["weighted_error"] < m["relative_error"] < 1 for m in report["modules"])


@pytest.mark.parametrize("calibration", ["cache", None])
def test_conversions_repeat_to_the_byte(
    place: Path, tmp_path: Path, calibration: str | None
) -> None:
    wished = config(place, calibration=calibration and str(place / calibration))
    files = []
    for workers in (1, 2):
        out = tmp_path / str(workers)
        settings = wished.model_copy(update={"workers": workers})
        convert_checkpoint(str(place / "float"), settings, out)
        files.append((out / "model.safetensors").read_bytes())
    assert files[0] == files[1]


def calibration(place: Path, given: object, **values: object) -> TokenBatch:
    """All rows that a conversion would calibrate on."""
    student = load_model(str(place / "float"), device="cpu")
    found = calibration_batches(given, config(place, **values), student, tiny_tokenizer())
    assert all(len(batch.input_ids) <= BATCH for batch in found)
    return TokenBatch(*(torch.cat(part) for part in zip(*found, strict=True)))


def test_calibration_text_is_packed_to_the_wished_length(place: Path) -> None:
    ids, positions = calibration(place, place / "text.txt", calibration_sequences=20)
    assert ids.shape == positions.shape == (20, 32)
    # positions restart behind every document's end, but in the padding
    end = tiny_tokenizer().eos_token_id
    ends = (ids[:, :-1] == end) & (ids[:, 1:] != end)
    assert ends.any() and (positions[:, 1:][ends] == 0).all()


def test_calibration_is_drawn_from_the_whole_training_split_of_a_cache(place: Path) -> None:
    cache = TeacherCache.open(place / "cache")
    count = cache.num_sequences("train")
    everything = cache.batch(np.arange(count))
    rows = [row.tolist() for row in everything.input_ids]
    drawn = []
    for wished, seed in ((7, 0), (7, 1), (10_000, 0)):
        values = {"calibration_sequences": wished, "calibration_seed": seed}
        ids, positions = calibration(place, place / "cache", **values)
        drawn.append([rows.index(row.tolist()) for row in ids])
        assert torch.equal(positions, everything.position_ids[drawn[-1]])
    assert len(set(drawn[0])) == len(drawn[0]) == 7 and drawn[0] != drawn[1]
    assert max(drawn[0]) > count // 2 and max(drawn[1]) > count // 2
    assert sorted(drawn[2]) == list(range(count))


@pytest.mark.parametrize("as_tokens", [False, True])
def test_calibration_is_drawn_from_all_texts_and_tokens_that_are_given(
    place: Path, as_tokens: bool
) -> None:
    """Hundreds of documents of one word, then as many of another: each has its share."""
    tokenizer = tiny_tokenizer()
    documents = ["cat " * 60] * 200 + ["dog " * 60] * 200
    words = [tokenizer(" " + word).input_ids[-1] for word in ("cat", "dog")]
    given = [torch.tensor(tokenizer(text).input_ids[:32]) for text in documents]
    shares = []
    for seed in range(3):
        ids, _ = calibration(
            place,
            given if as_tokens else documents,
            calibration_sequences=40,
            calibration_seed=seed,
        )
        first, second = ((ids == word).sum() for word in words)
        shares.append((first / (first + second)).item())
    assert all(0.2 < share < 0.8 for share in shares) and len(set(shares)) > 1


def test_of_an_endless_text_only_so_much_is_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration_data, "MOST_CHARACTERS", 20_000)
    read = itertools.count()
    endless = (Sourced(f"the cat sat on the mat {number}") for number in read)
    monkeypatch.setattr(
        calibration_data, "open_source", lambda _, setting: DataSource(endless, "plain", "endless")
    )
    assert calibration(place, "owner/name", calibration_sequences=3).input_ids.shape == (3, 32)
    assert next(read) < 1000


def test_the_group_size_of_a_plan_may_be_overridden(place: Path) -> None:
    assert read_plan(config(place, to="q2a4")) is PRESETS["q2a4"]
    changed = read_plan(config(place, to="q2a4", group_size=8))
    assert changed.spec_for("a.mlp.b") == by_group(2, 8)
    assert changed.spec_for("a.self_attn.b") == by_group(4, 8)
    plan = read_plan(config(place, group_size=8))
    assert plan.spec_for("a.mlp.down_proj") is None
    assert plan.spec_for("a.mlp.up_proj").group_size == 8


def test_a_presets_name_says_how_keys_and_values_are_kept(place: Path) -> None:
    eight, four = KvSpec(bits=8), KvSpec(bits=4)
    assert split_kv("q2a4_kv4") == ("q2a4", four)
    assert split_kv("q2a4_r32_kv8") == ("q2a4_r32", eight)
    assert split_kv("q2a4_a8kv8") == ("q2a4_a8", eight)
    assert split_kv("q2a4") == ("q2a4", None) and split_kv("kv4") == ("kv4", None)
    assert read_plan(config(place, to="q2a4_kv4")) is PRESETS["q2a4"]
    assert read_kv(config(place, to="q2a4_kv4")) == four
    assert read_kv(config(place, to="q2a4_kv4", kv="int4")) == four
    assert read_kv(config(place, kv="int8")) == eight
    assert read_kv(config(place)) is None
    with pytest.raises(ConfigError, match="to=q2a4_kv4 keeps keys and values in 4 bits, but kv="):
        read_kv(config(place, to="q2a4_kv4", kv="int8"))


def test_keys_and_values_stay_as_they_were_asked_to_be(place: Path, tmp_path: Path) -> None:
    report = convert_checkpoint(
        str(place / "float"), config(place, to=None, kv="int8"), tmp_path / "kv"
    )
    assert report.kv.bits == 8 and not report.modules
    assert report.kv.bytes_per_token == 2 * 2 * (32 + 4)
    assert report.kv.bf16_frac == pytest.approx(36 / 64)
    settings = config(place, calibration=str(place / "text.txt"), calibration_sequences=4)
    for source, asked, bits in (("kv", {}, 8), ("kv", {"kv": "int4"}, 4)):
        out = tmp_path / str(bits)
        convert_checkpoint(str(tmp_path / source), settings.model_copy(update=asked), out)
        assert kv_spec(load_checkpoint(out).config) == KvSpec(bits=bits)
        written = json.loads((out / REPORT_NAME).read_text())
        assert written["kv"]["bits"] == bits


def test_a_budget_becomes_a_plan_that_can_be_used_again(place: Path, tmp_path: Path) -> None:
    source, text = str(place / "float"), str(place / "text.txt")
    settings = config(place, bits_budget=3.3, calibration=text, calibration_sequences=8)
    report = convert_checkpoint(source, settings, tmp_path / "mixed")
    assert report.plan == "mixed-3.3-of-linears" and report.linear_bits <= 3.3
    written = json.loads((tmp_path / "mixed" / REPORT_NAME).read_text())
    assert written["budget"]["predicted_kl_nats"] == report.budget.predicted_kl_nats > 0
    assert written["budget"]["modules"].keys() == {m.name for m in report.modules}
    again = settings.model_copy(
        update={"bits_budget": None, "to": str(tmp_path / "mixed" / PLAN_NAME)}
    )
    convert_checkpoint(source, again, tmp_path / "again")
    mixed, same = (tmp_path / name / "model.safetensors" for name in ("mixed", "again"))
    assert mixed.read_bytes() == same.read_bytes()
    assert not (tmp_path / "again" / PLAN_NAME).exists()


@pytest.mark.slow
def test_a_budget_without_a_plan_is_for_all_linears_and_tables(place: Path, tmp_path: Path) -> None:
    text = str(place / "text.txt")
    settings = config(
        place, to=None, bits_budget=3.9, calibration=text, calibration_sequences=4,
        embedding_bits=None, base=str(place / "float"),
    )  # fmt: skip
    report = convert_checkpoint(str(place / "four"), settings, tmp_path / "out")
    assert len(report.budget.modules) == 16
    assert {"model.embed_tokens", "lm_head"} <= report.budget.modules.keys()
    specs = {name: m.spec for name, m in quant_linears(load_checkpoint(tmp_path / "out")).items()}
    for name, spec in specs.items():
        (taken,) = (t for t in report.budget.modules[name] if t.is_chosen)
        found = (taken.bits, taken.vector_size, taken.group_size)
        assert found == (spec.index_bits, spec.vector_size, spec.group_size)


def test_plan_files_that_are_wrong(place: Path, tmp_path: Path) -> None:
    for text, message in (
        (b"[[rules]\n", r"to=\S+plan.toml is not TOML \(.*\), expected a plan; mend that line"),
        (b"\xff\xfe", r"is not TOML \(.*utf-8"),
        (b'nmae = "x"\nrules = []\n', "nmae is unknown; did you mean .name."),
        (b'name = "x"\n', "rules: Field required"),
        (b'name = "x"\nrules = [{}]\n', "rules.0={}: a rule needs a pattern or a role; add one"),
        (
            b'name = "x"\n[[rules]]\npattern = "*"\nspec = { bits = 9 }\n',
            "bits=9, expected at most 8 of an index that names one weight; give vector_size",
        ),
        (
            b'name = "x"\n[[rules]]\npattern = "*"\nspec = { bits = 2, scale_bits = 12 }\n',
            "rules.0.spec.scale_bits=12: Input should be 32, 16, 8 or 5$",
        ),
        (b'name = "x"\n[[rules]]\npattern = "*.moe.*"\n', r"pattern '\*.moe.\*' matches none"),
    ):
        plan = tmp_path / "plan.toml"
        plan.write_bytes(text)
        with pytest.raises(ConfigError, match=message):
            convert_checkpoint(str(place / "float"), config(place, to=str(plan)), tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


def test_settings_that_are_wrong(place: Path, tmp_path: Path) -> None:
    for values, error, message in (
        ({"group_size": 24}, ConfigError, "gate_proj: group_size=24 does not divide its 32 input"),
        ({"calibration": "{}/float"}, DataError, "config.json holds a JSON dict"),
        ({"calibration": "{}/foreign"}, CacheError, "tokenizer .* the student"),
        ({"calibration": "{}/held"}, ConfigError, "held has no training sequences"),
        (
            {"calibration": "{}/short.txt"},
            ConfigError,
            "short.txt holds less than one sequence of 32 tokens; give more text or lower --cal",
        ),
        (
            {"calibration": "{}/text.txt", "bits_budget": 2.2},
            ConfigError,
            "bits_budget=2.2, but these 4 linears can take 2.5",
        ),
        (
            {"calibration": "{}/text.txt", "calibration_length": 129},
            ConfigError,
            "calibration_length=129, but the model reads at most 128 positions; lower --calib",
        ),
    ):
        filled = {k: v.format(place) if isinstance(v, str) else v for k, v in values.items()}
        with pytest.raises(error, match=message):
            convert_checkpoint(str(place / "float"), config(place, **filled), tmp_path / "out")
        assert not any(tmp_path.iterdir())


def test_a_directory_in_use_is_refused_before_any_work(place: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match=r"out=\S+ is not empty"):
        convert_checkpoint("nowhere", config(place), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_device_that_compiles_for_each_value_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "is_traced", True)
    with pytest.raises(ConfigError, match="device=.*; use --device"):
        convert_checkpoint(str(place / "float"), ConvertConfig(to="q2a4"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_head_of_its_own_is_kept_whatever_the_configuration_ties(tmp_path: Path) -> None:
    save_tiny(tmp_path / "in", "llama", tie_word_embeddings=False)
    path = tmp_path / "in" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    convert_checkpoint(str(tmp_path / "in"), ConvertConfig(to="q4a4"), tmp_path / "out")
    student = load_checkpoint(tmp_path / "out")
    assert table_names(student) == ["model.embed_tokens", "lm_head"]
    head = load_file(tmp_path / "in" / "model.safetensors")["lm_head.weight"]
    kept = student.lm_head.quantized_weight()
    assert (kept - head).norm() < 0.02 * head.norm()
