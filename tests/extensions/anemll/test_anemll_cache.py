"""Imported caches of the reference system: its targets, its loss, and no tail."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from legacy_case import save_base, save_legacy_cache
from torch import Tensor
from torch.nn import functional as F

from qat.cli import run_verb
from qat.cli.inputs import with_fitting_loss
from qat.data.cache import read_manifest
from qat.data.config import ImportConfig
from qat.data.reader import TeacherCache
from qat.data.shard_file import check_shards
from qat.data.text import tokenizer_hash
from qat.errors import CacheError, ConfigError
from qat.evaluate.divergence import divergence_by_source
from qat.evaluate.judge import split_batches
from qat.extensions.anemll.cache import import_cache, read_meta
from qat.extensions.anemll.reading import ImportedCache
from qat.extensions.bench.config import BenchConfig
from qat.losses.config import check_targets, fitting_loss
from qat.models.load import load_model, load_tokenizer
from qat.observe.runs import score
from qat.train.config import TrainConfig


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("legacy_cache")
    save_base(place / "base")
    return place


@pytest.fixture(scope="module")
def stored(place: Path) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return save_legacy_cache(place / "foreign")


@pytest.fixture(scope="module")
def cache(place: Path, stored: dict[str, Tensor]) -> TeacherCache:
    settings = ImportConfig(teacher=str(place / "base"), held_out=0.2, keep_negatives=True)
    import_cache(place / "foreign", settings, place / "ours")
    return TeacherCache.open(place / "ours")


def test_tokens_and_targets(cache: TeacherCache, stored: dict[str, Tensor]) -> None:
    batch = cache.batch(range(9))
    assert torch.equal(batch.input_ids, stored["input_ids"][:9].long())
    assert batch.position_ids.tolist() == [list(range(9))] * 9
    assert batch.mask.tolist() == [[True] * 8 + [False]] * 9
    assert torch.equal(batch.labels[:, :-1], batch.input_ids[:, 1:])
    order = stored["topk_idx"][:9].argsort(-1)
    exact = stored["topk_logits"][:9].float().log_softmax(-1).gather(-1, order)
    ids, places = batch.topk_ids[:, :-1].sort(-1)
    assert torch.equal(ids, stored["topk_idx"][:9].long().gather(-1, order))
    assert (batch.topk_logprobs[:, :-1].gather(-1, places) - exact).abs().max() < 0.02
    assert batch.topk_logprobs.diff(dim=-1).le(0).all()
    assert batch.tail_logprob.isnan().all()


def test_the_last_sequences_are_held_out(cache: TeacherCache, stored: dict[str, Tensor]) -> None:
    assert cache.num_sequences("train") == 9 and cache.num_sequences("held_out") == 2
    held_out = cache.batch([0, 1], split="held_out").input_ids
    assert torch.equal(held_out, stored["input_ids"][9:].long())


def test_random_tokens_on_request(
    cache: TeacherCache, stored: dict[str, Tensor], place: Path, tmp_path: Path
) -> None:
    ids, logits = ImportedCache.open(cache.directory).negatives([8, 0])
    assert torch.equal(ids, stored["rand_idx"][[8, 0]].long())
    assert torch.equal(logits, stored["rand_logits"][[8, 0]])
    settings = ImportConfig(teacher=str(place / "base"))
    import_cache(place / "foreign", settings, tmp_path / "without")
    without = ImportedCache.open(tmp_path / "without")
    assert without.negatives([0])[0].shape == (1, 8, 0)
    files = sum(path.stat().st_size for path in (tmp_path / "without").iterdir())
    assert files < sum(path.stat().st_size for path in cache.directory.iterdir())


def test_the_manifest_says_what_it_is(cache: TeacherCache, place: Path) -> None:
    manifest = read_manifest(cache.directory)
    assert not manifest.has_tail and manifest.negatives == 3
    assert manifest.settings.format == "alpaca" and manifest.settings.thinking == "both"
    assert manifest.teacher.name == "nowhere" and manifest.teacher.identity.startswith("unknown")
    assert manifest.tokenizer == tokenizer_hash(load_tokenizer(str(place / "base")))
    assert manifest.total("counted") == 88
    assert not any(finding.problem for finding in check_shards(cache.directory)[1])


def test_the_loss_is_the_one_of_the_reference(
    cache: TeacherCache, stored: dict[str, Tensor], place: Path
) -> None:
    student = load_model(str(place / "base"), device="cpu", dtype="fp32")
    (found, _) = divergence_by_source(student, split_batches(cache, "train", batch_size=4))
    with torch.no_grad():
        logits = student.model(stored["input_ids"][:9].long()).logits[:, :-1]
    log_q = F.log_softmax(logits.gather(-1, stored["topk_idx"][:9].long()) / 2, -1)
    p = F.softmax(stored["topk_logits"][:9].float() / 2, -1)
    expected = 4 * F.kl_div(log_q, p, reduction="none").sum(-1).mean()
    assert found.kd_nats == pytest.approx(expected.item(), rel=2e-3)
    assert found.kl_tail_nats is None and found.ppl is not None
    assert score(found._asdict()) == found.kd_nats


@pytest.mark.parametrize("loss", ["tail", "reverse_kl", "jsd", "cakld"])
def test_losses_that_need_a_tail_are_refused(loss: str) -> None:
    with pytest.raises(ConfigError, match=f"^loss={loss} reads .* use --loss candidates, or"):
        check_targets({loss: 1.0}, 4, 0, has_tail=False)
    check_targets({"candidates": 1.0, "hard_ce": 0.1}, 4, 0, has_tail=False)
    with pytest.raises(ConfigError, match="sampled .* draws.* among candidates, hard_ce$"):
        check_targets({"sampled": 1.0}, 4, 0, has_tail=False)


def test_a_student_learns_from_it(cache: TeacherCache, place: Path, tmp_path: Path) -> None:
    student = tmp_path / "student"
    run_verb(["convert", str(place / "base"), "--to", "q2a2", "--out", str(student)])
    flags = ["--cache-dir", str(cache.directory), "--max-steps", "1", "--batch-size", "4"]
    train = ["train", str(student), *flags, "--device", "cpu"]
    with pytest.raises(ConfigError, match="loss=tail reads the teacher's mass outside"):
        run_verb([*train, "--loss", "tail", "--out", str(tmp_path / "refused")])
    run_verb([*train, "--out", str(tmp_path / "run")])  # of its own accord with candidates
    assert 'loss = "candidates"' in (tmp_path / "run" / "recipe.toml").read_text()
    verdicts = [
        json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert any("kd_nats" in line and line["kl_tail_nats"] is None for line in verdicts)


def test_the_verb_and_a_directory_packed_in_itself(
    place: Path, stored: dict[str, Tensor], tmp_path: Path, monkeypatch, capsys
) -> None:
    (tmp_path / "name").mkdir()
    (tmp_path / "name" / "name").symlink_to(place / "foreign")
    monkeypatch.chdir(tmp_path)
    result = run_verb(["cache", "import", "name", "--teacher", str(place / "base")])
    assert str(result["out"]) == "caches/name" and not result["has_tail"]
    assert result["sequences"] == 10 and result["held_out_sequences"] == 1
    run_verb(["cache", "info", "caches/name"])
    assert "4 (tail unknown)" in capsys.readouterr().out


@pytest.mark.usefixtures("stored")
def test_a_model_of_another_vocabulary_is_refused(place: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(place / "base", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 512}))
    message = "has 512 words, but the teacher of .* had 320; expected the same vocabulary"
    with pytest.raises(CacheError, match=message):
        import_cache(place / "foreign", ImportConfig(teacher=str(other)), tmp_path / "out")


def test_verbs_take_the_loss_that_it_can_give(cache: TeacherCache, caplog) -> None:
    directory = cache.directory
    config = TrainConfig(cache_dir=str(directory))
    assert with_fitting_loss(config, config.cache_dir).loss == "candidates"
    assert caplog.messages == [
        f"{directory} was imported without the teacher's tail: learning with --loss candidates"
    ]
    named = TrainConfig(cache_dir=str(directory), loss="tail")  # what is asked for is refused
    assert with_fitting_loss(named, named.cache_dir) is named
    measured = BenchConfig(cache_dir=directory)
    assert with_fitting_loss(measured, measured.cache_dir).loss == "candidates"
    assert with_fitting_loss(BenchConfig(), None).loss == "tail"


@pytest.mark.parametrize(
    ("top_k", "draws", "has_tail", "loss"),
    [(4, 0, True, "tail"), (4, 0, False, "candidates"), (0, 9, True, "sampled")],
)
def test_the_fitting_loss_is_one_that_the_cache_gives(top_k, draws, has_tail, loss) -> None:
    assert fitting_loss(top_k, draws, has_tail=has_tail) == loss
    check_targets({loss: 1.0}, top_k, draws, has_tail=has_tail)


def refused(source: Path, base: Path, message: str, **settings: object) -> None:
    out = source.parent / "out"
    with pytest.raises(CacheError, match=message):
        import_cache(source, ImportConfig(teacher=str(base), **settings), out)
    assert not out.exists() and not list(source.parent.glob(".*"))


def test_caches_that_are_none(place: Path, tmp_path: Path) -> None:
    base, source = place / "base", tmp_path / "foreign"
    refused(source, base, "is no directory, expected a cache")
    source.mkdir()
    refused(source, base, "holds no meta.json")
    (source / "meta.json").write_text("{")
    refused(source, base, "meta.json is not JSON")
    (source / "meta.json").write_text('{"format": "other"}')
    refused(source, base, "says format='other', expected 'qwen_kd")
    (source / "meta.json").write_text('{"format": "qwen_kd_topk_cache_v1"}')
    refused(source, base, "says vocab_size=None, expected the width")
    meta = '{"format": "qwen_kd_topk_cache_v1", "vocab_size": 320, "tokenizer": "./gone"}'
    (source / "meta.json").write_text(meta)
    refused(source, base, r"holds no shard_\*.pt")
    with pytest.raises(CacheError, match="tokenizer .* cannot be opened .* add --teacher MODEL"):
        import_cache(source, ImportConfig(), tmp_path / "out")


@pytest.mark.parametrize("said", ["", 7, None])
def test_what_a_description_does_not_say_is_unknown(said: object, tmp_path: Path) -> None:
    names = ("teacher_model", "tokenizer", "dataset_name")
    meta = {"format": "qwen_kd_topk_cache_v1", "vocab_size": 320} | dict.fromkeys(names, said)
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    found = read_meta(tmp_path)
    assert (found.teacher, found.tokenizer, found.data) == ("unknown",) * 3


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("topk_idx", lambda t: t + 320, "topk_idx has torch.int32 from .* expected ids below"),
        ("input_ids", lambda t: t.masked_fill(t == t.max(), 320), " to 320, expected ids below"),
        ("topk_idx", lambda t: t * 0, "topk_idx names a token twice"),
        ("topk_logits", lambda t: t * torch.nan, "topk_logits holds NaN or infinity"),
        ("topk_logits", lambda t: t[:, :-1], r"topk_logits has shape \(6, 7, 4\), expected"),
        ("input_ids", lambda t: t - 400, "input_ids has torch.int32 from -"),
        ("attention_mask", lambda t: t.cumsum(1) > 1, "padding before tokens"),
        ("topk_idx", lambda t: None, "has no topk_idx, expected a shard"),
        ("topk_idx", lambda t: "text", "topk_idx is a str, expected a plain tensor"),
    ],
)
def test_shards_that_are_damaged(
    name: str, change, message: str, place: Path, tmp_path: Path
) -> None:
    save_legacy_cache(tmp_path / "foreign")
    file = tmp_path / "foreign" / "shard_00000.pt"
    shard = torch.load(file, weights_only=True)
    shard[name] = change(shard[name])
    torch.save(shard, file)
    refused(tmp_path / "foreign", place / "base", message)


def test_shards_that_differ_and_too_few_sequences(place: Path, tmp_path: Path) -> None:
    save_legacy_cache(tmp_path / "foreign", sequences=(1, 1))
    base = place / "base"
    refused(tmp_path / "foreign", base, "of which held_out=0.9 leaves none", held_out=0.9)
    file = tmp_path / "foreign" / "shard_00001.pt"
    shard = torch.load(file, weights_only=True)
    shard |= {name: shard[name][..., :3] for name in ("topk_idx", "topk_logits")}
    torch.save(shard, file)
    refused(tmp_path / "foreign", base, r"mixes shards of \(length, K, R\)=\(9, 3, 3\) and \(9, 4")


def test_padding_at_the_end_does_not_count(place: Path, tmp_path: Path) -> None:
    save_legacy_cache(tmp_path / "foreign", sequences=(3,))
    file = tmp_path / "foreign" / "shard_00000.pt"
    shard = torch.load(file, weights_only=True)
    shard["attention_mask"][0, 5:] = 0
    torch.save(shard, file)
    settings = ImportConfig(teacher=str(place / "base"), held_out=0.0)
    import_cache(tmp_path / "foreign", settings, tmp_path / "out")
    batch = TeacherCache.open(tmp_path / "out").batch([0])
    assert batch.mask[0].tolist() == [True] * 4 + [False] * 5
    assert batch.position_ids[0].tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3]
