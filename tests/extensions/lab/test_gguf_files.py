"""Distance of GGUF files from their teacher: the numbers, the contexts, and the whole verb."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cache_case import build
from cli_case import call
from torch import Tensor

from qat.data.packing import NO_LABEL
from qat.data.reader import TeacherCache
from qat.errors import CacheError, CheckpointError, ConfigError, DataError
from qat.evaluate.judge import split_batches
from qat.extensions.bench.results import ROWS, WHOLE
from qat.extensions.lab import gguf_files
from qat.extensions.lab.config import GgufConfig
from qat.extensions.lab.gguf_files import (
    FLOATS,
    OTHER,
    OURS,
    PICTURE,
    best_at,
    cache_contexts,
    case_names,
    chart,
    describe,
    judge,
    read_contexts,
    run_gguf,
    teacher_logits,
)
from qat.extensions.lab.llamacpp import LlamaCpp, library
from qat.extensions.lab.positions import CHUNK, Context, text_contexts
from qat.extensions.lab.verbs import gguf_file
from qat.models.gguf_header import read_header
from qat.models.load import load_model

pytest.importorskip("gguf")
from gguf_case import write_gguf  # noqa: E402

V = 320


class FakeEngine:
    """Logits that depend on the last two tokens, and by `noise` on the seed of a file."""

    def __init__(self, seed: int, noise: float = 0.0, *, vocab_size: int = V) -> None:
        drawn = torch.Generator().manual_seed(0), torch.Generator().manual_seed(seed)
        self.vocab_size, self.is_closed = vocab_size, False
        base, other = (torch.randn(V, vocab_size, generator=each) for each in drawn)
        self.table = 3 * base + noise * other

    def tokens(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def begin_token(self) -> int | None:
        return 7

    def logits(self, ids: Sequence[int]) -> Tensor:
        tokens = torch.tensor(ids)
        return self.table[tokens] + self.table[tokens.roll(1)] / 3

    def close(self) -> None:
        self.is_closed = True


def opener(noises: dict[str, float]) -> Callable[[Path, int], FakeEngine]:
    """Open files by their names: each with its noise, the teacher without any."""
    return lambda path, _: FakeEngine(len(path.stem), noises.get(path.stem, 0.0))


def contexts(*lengths: int) -> list[Context]:
    rng = torch.Generator().manual_seed(1)
    found = []
    for length in lengths:
        ids = torch.randint(V, (length,), generator=rng)
        found.append(Context(ids.tolist(), torch.arange(length - 1), ids[1:]))
    return found


def textbook(engine: FakeEngine, teacher: FakeEngine, cases: list[Context]) -> list[np.ndarray]:
    """Return KL, the file's top token, the teacher's, the label, and the file's surprise."""
    q, p = (
        torch.cat([each.logits(c.ids)[c.places] for c in cases]).double()
        for each in (engine, teacher)
    )
    labels = torch.cat([each.labels for each in cases])
    kl = F.kl_div(q.log_softmax(1), p.log_softmax(1), log_target=True, reduction="none").sum(1)
    nll = F.cross_entropy(q, labels, reduction="none")
    return [t.numpy() for t in (kl, q.argmax(1), p.argmax(1), labels, nll)]


def test_all_numbers_are_the_textbooks(tmp_path: Path) -> None:
    cases = contexts(CHUNK + 12, 9, 3 * CHUNK)
    engine, teacher = FakeEngine(5, 1.5), FakeEngine(0)
    for each in cases:  # let the teacher be right sometimes
        each.labels[::3] = teacher.logits(each.ids)[each.places][::3].argmax(1)
    kept = teacher_logits(teacher, cases, tmp_path)
    found = judge(lambda: engine, Path("x.gguf"), cases, kept)
    kl, top, teacher_top, labels, nll = textbook(engine, teacher, cases)
    assert found.num_tokens == len(kl)
    assert found.kl_nats == pytest.approx(kl.mean(), rel=1e-12)
    assert found.kl_stderr_nats == pytest.approx(kl.std(ddof=1) / len(kl) ** 0.5, rel=1e-12)
    assert found.kl_p99_nats == pytest.approx(np.percentile(kl, 99), rel=1e-12)
    assert found.top1_frac == pytest.approx((top == teacher_top).mean())
    right = teacher_top == labels
    assert 0 < found.flips_frac < 1
    assert found.flips_frac == pytest.approx((top != labels)[right].mean())
    assert found.ppl == pytest.approx(np.exp(nll.mean()))
    assert found.teacher_ppl == pytest.approx(np.exp(textbook(teacher, teacher, cases)[4].mean()))
    assert engine.is_closed
    assert not [*tmp_path.iterdir()]


def test_contexts_are_those_of_llama_perplexity() -> None:
    first, second = text_contexts(range(100, 121), 7, 8)
    assert first.ids == [7, *range(101, 108)] and second.ids == [7, *range(109, 116)]
    assert first.places.tolist() == [4, 5, 6] and first.labels.tolist() == [105, 106, 107]
    assert next(text_contexts(range(8), None, 8)).ids == [*range(8)]
    assert [*text_contexts(range(7), None, 8)] == []


def test_documents_of_a_cache_are_judged_apart_where_the_loss_counts(tmp_path: Path) -> None:
    build(tmp_path / "cache")
    cache = TeacherCache.open(tmp_path / "cache")
    rows = [*split_batches(cache, "held_out", 1)[""]]
    found = [*cache_contexts(cache, 0)]
    valid = sum(int((row.mask & (row.labels != NO_LABEL)).sum()) for row in rows)
    assert sum(len(each.places) for each in found) == valid > len(found) > len(rows)
    for each in found:
        inside = each.places[:-1]  # the token behind the last position is not read
        assert each.labels[: len(inside)].tolist() == [each.ids[at + 1] for at in inside]
        assert int(each.places[-1]) == len(each.ids) - 1
    some = [*cache_contexts(cache, 1)]
    assert [each.ids for each in some] == [each.ids for each in found[: len(some)]]
    path = write_gguf(tmp_path / "x.gguf")
    config, seen = GgufConfig(cache_dir=tmp_path / "cache", contexts=0), []

    def open_file(_: Path, context: int) -> FakeEngine:
        seen.append(context)
        return FakeEngine(0)

    (row,) = run_gguf(config, str(path), [path], out=tmp_path / "out", open_file=open_file).rows
    assert (row["num_tokens"], row["kl_nats"]) == (valid, 0)
    assert set(seen) == {cache.manifest.settings.sequence_length}


def rows(*places: tuple[str, float, float]) -> list[dict]:
    return [{"kind": k, "case": f"{k}{m}", "megabytes": m, "kl_nats": n} for k, m, n in places]


def test_the_rival_is_the_best_of_no_more_megabytes() -> None:
    others = rows((OTHER, 50.0, 0.4), (OTHER, 60.0, 0.5), (OTHER, 70.0, 0.1))
    others += rows((OURS, 55.0, 0.01), (OTHER, 40.0, 0.0))  # the second is the teacher itself
    assert best_at(49.0, others)["megabytes"] == 50.0  # the smallest, though it is larger
    assert best_at(65.0, others)["megabytes"] == 50.0
    assert best_at(70.0, others)["megabytes"] == 70.0
    assert best_at(70.0, others[3:]) is None


def test_exports_are_named_by_their_directories() -> None:
    exports = [Path("exports/a/model.gguf"), Path("exports/b/model.gguf"), Path("x/q2_k.gguf")]
    assert case_names(exports) == ["a", "b", "q2_k"]
    runs = [Path("runs/a/export/gguf/model.gguf"), Path("runs/b/export/gguf/model.gguf")]
    assert case_names(runs) == ["a", "b"]
    alike = [Path("x/q2.gguf"), Path("y/q2.gguf")]
    assert case_names(alike) == [str(path) for path in alike]
    with pytest.raises(ConfigError, match="twice"):
        case_names([alike[0], alike[0]])


def test_files_are_described_by_their_headers(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "q5.gguf")
    found, tensors = describe(path), [*read_header(path).values()]
    octets = sum(np.prod(each.byte_shape) for each in tensors)
    count = sum(np.prod(each.shape) for each in tensors)
    assert found["megabytes"] == path.stat().st_size / 1e6
    assert found["bits_per_weight"] == pytest.approx(8 * octets / count)
    assert set(found["types"]) == {"Q5_0", "Q8_0", "F32"}
    assert sum(found["types"].values()) == pytest.approx(1, abs=2e-4)


def test_a_comparison_from_files_to_picture(tmp_path: Path) -> None:
    paths = [write_gguf(tmp_path / f"{name}.gguf") for name in ("near", "middle", "far")]
    text = tmp_path / "text.txt"
    text.write_text("abcdefgh" * 40)
    opened = []

    def open_file(path: Path, context: int) -> FakeEngine:
        opened.append((path, {each.type for each in read_header(path).values()}, context))
        return opener({"near": 0.3, "middle": 1.0, "far": 2.0})(path, context)

    config = GgufConfig(text=text, context=64, contexts=3)
    out = tmp_path / "out"
    near, middle, far = paths
    report = run_gguf(config, str(near), [near, far], [middle], out=out, open_file=open_file)
    teacher, *files = opened
    # the teacher is the float weights of a quantized file, gone when all is done
    assert teacher[1] <= FLOATS and not teacher[0].exists()
    assert [each[0] for each in files] == [middle, near, far]
    assert {each[2] for each in opened} == {64}
    written = [json.loads(line) for line in (out / ROWS).read_text().splitlines()]
    assert [row["case"] for row in written] == ["middle", "near", "far"]
    kl = {row["case"]: row["kl_nats"] for row in written}
    assert 0 < kl["near"] < kl["middle"] < kl["far"]
    assert report.ratios == {name: kl[name] / kl["middle"] for name in ("near", "far")}
    assert json.loads((out / WHOLE).read_text())["ratios"] == report.ratios
    assert {row["num_tokens"] for row in written} == {3 * 31}
    assert (out / f"{PICTURE}.png").stat().st_size > 0
    svg = (out / f"{PICTURE}.svg").read_text()
    assert all(f"<!-- {name} -->" in svg for name in kl)
    names = {f"{PICTURE}.svg", f"{PICTURE}.png", ROWS, WHOLE, "results.csv"}
    assert {each.name for each in out.iterdir()} == names


def test_a_file_of_floats_is_the_teacher_itself(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "f32.gguf", "F32")  # but for its head, which is of Q8_0
    assert gguf_files.float_file(str(path), tmp_path) == tmp_path / "model.gguf"
    floats = load_model(str(path), device="cpu", dtype="fp32").model.state_dict()
    again = tmp_path / "again"
    again.mkdir()
    assert gguf_files.float_file(str(tmp_path / "model.gguf"), again) == tmp_path / "model.gguf"
    read = load_model(str(tmp_path / "model.gguf"), device="cpu", dtype="fp32").model.state_dict()
    assert floats.keys() == read.keys()
    assert all(torch.equal(floats[name], read[name]) for name in floats)


@pytest.mark.parametrize(
    ("overrides", "error", "field"),
    [
        ({"context": 512}, ConfigError, "context=512, but .* 128 tokens"),
        ({"context": 120}, DataError, "context=120"),
        ({"text": "cut.gguf"}, DataError, "UTF-8"),
        ({"contexts": 10**9}, ConfigError, "GB"),
        ({"text": None, "cache_dir": "cache"}, CacheError, "cache_dir="),
    ],
)
def test_inputs_that_do_not_fit_are_refused(
    tmp_path: Path, monkeypatch, overrides: dict, error: type, field: str
) -> None:
    path, text = write_gguf(tmp_path / "x.gguf"), tmp_path / "text.txt"
    text.write_text("abc" * 30)
    if overrides.get("cache_dir"):
        build(tmp_path / "cache")
        overrides = overrides | {"cache_dir": tmp_path / "cache"}
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:-1000])
    if overrides.get("text"):
        overrides = overrides | {"text": tmp_path / overrides["text"]}
    if overrides.get("contexts"):
        usage = type("usage", (), {"free": 10**4})
        monkeypatch.setattr(gguf_files.shutil, "disk_usage", lambda _: usage)
    width = V + 1 if error is CacheError else V
    config = GgufConfig(**{"text": text, "context": 32, **overrides})
    with pytest.raises(error, match=field):
        run_gguf(
            config,
            str(path),
            [path],
            out=tmp_path / "out",
            open_file=lambda *_: FakeEngine(0, vocab_size=width),
        )


def test_a_damaged_file_is_refused_before_the_teacher_runs(tmp_path: Path) -> None:
    path, text = write_gguf(tmp_path / "x.gguf"), tmp_path / "text.txt"
    text.write_text("abc" * 100)
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(path.read_bytes()[:-1000])
    config = GgufConfig(text=text, context=32)
    with pytest.raises(CheckpointError, match=r"cut\.gguf holds"):
        run_gguf(config, str(path), [path], [cut], out=tmp_path / "out", open_file=pytest.fail)
    assert not (tmp_path / "out").exists()


def test_another_vocabulary_or_no_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{V + 1} words"):
        other = FakeEngine(0, vocab_size=V + 1)
        judge(lambda: other, Path("x.gguf"), contexts(4), np.zeros((3, V), np.float32))
    assert other.is_closed
    path = write_gguf(tmp_path / "x.gguf", has_tokenizer=False)
    with pytest.raises(ConfigError, match="tokenizer"):
        read_contexts(GgufConfig(text=tmp_path / "text.txt"), FakeEngine(0), path)


def test_the_verb_wants_files_and_one_source(tmp_path: Path, monkeypatch, capsys) -> None:
    path, text = write_gguf(tmp_path / "x.gguf"), tmp_path / "text.txt"
    text.write_text("abc")
    words = ["bench", "gguf", path]
    (tmp_path / "none").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / f"{name}.gguf").touch()
    for more, field in (
        ([], "FILES"),
        ([path], "text=None beside cache_dir=None"),
        ([path, "--text", text, "--cache-dir", tmp_path], "beside cache_dir="),
        ([path, tmp_path / "no.gguf", "--text", text], "no.gguf is not there"),
        ([path, "--against", tmp_path / "none", "--text", text], "none is an empty directory"),
        ([tmp_path / "two", "--text", text], "two holds 2 GGUF files"),
    ):
        assert call(monkeypatch, *words, *more) == 1
        message = capsys.readouterr().err
        assert field in message and message.count("\n") == 1


@pytest.mark.parametrize("place", ["model.gguf", "q2.gguf", "export/gguf/model.gguf"])
def test_a_directory_of_an_export_or_a_run_stands_for_its_file(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert gguf_file(tmp_path) == gguf_file(path) == path


def test_without_the_library_an_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr("qat.extensions.lab.llamacpp.is_installed", lambda name: name == "gguf")
    with pytest.raises(ConfigError, match="llama_cpp .*llamacpp"):
        library()


def test_a_chart_shows_files_that_are_equal_to_the_teacher() -> None:
    found = rows((OURS, 50.0, 0.0), (OTHER, 60.0, 0.5))
    assert b"against60.0" in chart(found).render("svg")


@pytest.mark.slow
def test_llama_cpp_itself_judges_files(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = write_gguf(tmp_path / "q8.gguf", "Q8_0")
    floats = gguf_files.float_file(str(path), tmp_path)
    engine = LlamaCpp(floats, 64)
    ids = [*range(3, 300, 7)]
    theirs = engine.logits(ids).clone()
    assert torch.equal(engine.logits(ids), theirs)  # nothing is left of the text before
    model = load_model(str(floats), device="cpu", dtype="fp32").model
    torch.testing.assert_close(theirs, model(torch.tensor([ids])).logits[0], rtol=0, atol=1e-2)
    assert engine.vocab_size == V and engine.begin_token() is None
    engine.close()
    text = tmp_path / "text.txt"
    text.write_text("the cat sat, and 3 dogs saw it " * 20)
    config = GgufConfig(text=text, context=32, contexts=4)
    coarse = write_gguf(tmp_path / "q4.gguf", "Q4_0")
    report = run_gguf(config, str(floats), [floats, path, coarse], out=tmp_path / "out")
    same, near, far = (row["kl_nats"] for row in report.rows)
    assert same == 0 < near < far / 3
    (tmp_path / "cut.gguf").write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="does not open"):
        LlamaCpp(tmp_path / "cut.gguf", 64)
