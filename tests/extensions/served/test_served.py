"""A teacher behind a server: its cache is that of the same teacher here, or one line says why."""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import cache_case
import pytest
import torch
from cache_case import TOKENIZER, contents, info, teacher, texts
from engine_case import (
    NAME,
    RECORDED,
    SERVED,
    Replay,
    Stage,
    check_equal,
    played,
    recorded_build,
    recorded_teacher,
)
from tiny import VOCAB, tiny_model, tiny_tokenizer

from qat.cli import main, run_verb
from qat.data.cache import Manifest
from qat.data.config import CacheConfig
from qat.data.reader import TeacherCache
from qat.errors import CacheError, ConfigError, QatError
from qat.extensions.served import engines
from qat.extensions.served import teacher as served
from qat.extensions.served.engines import KEY
from qat.extensions.served.teacher import ServedTeacher
from qat.hub import web


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses too short to notice, and no key of whoever runs this."""
    monkeypatch.setattr(web, "PAUSE_S", 0.001)
    monkeypatch.setattr(web, "LONGEST_S", 0.02)
    monkeypatch.delenv(KEY, raising=False)


@pytest.fixture
def stage() -> Stage:
    return Stage()


def ask(address: str, *, k: int = 5, length: int = 16, at_once: int = 4) -> ServedTeacher:
    """The teacher behind `address`, looked at."""
    found = ServedTeacher(address, NAME, VOCAB, at_once)
    found.check(TOKENIZER, length, k)
    return found


def build(asked: ServedTeacher, out: Path, **values: object) -> Manifest:
    """The case's cache from a server's words."""
    about = info(identity=SERVED, dtype="unknown")
    return cache_case.build(out, teacher=asked, info=about, **{"draws": 0, **values})


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_every_engine_gives_the_cache_of_its_teacher(engine: str, tmp_path: Path) -> None:
    stage = Stage(engine)
    with played(stage) as address:
        found = build(ask(address), tmp_path / "served")
    cache_case.build(tmp_path / "local", draws=0)
    theirs = TeacherCache.open(tmp_path / "local")
    check_equal(TeacherCache.open(tmp_path / "served"), theirs)
    if engine == "llamacpp":  # which does not tell how likely an unlikely token is
        assert found.teacher_ppl is None
        assert stage.most_at_once <= 2
    else:
        assert found.teacher_ppl == pytest.approx(theirs.manifest.teacher_ppl, rel=1e-3)
        assert 1 < stage.most_at_once <= 4
    sent = [body for path, body in stage.asked if body and "prompt_logprobs" in body]
    # documents are sent by themselves: what is in front of one is not read with it
    assert engine != "vllm" or any(len(body["prompt"]) > 1 for body in sent)


def test_the_log_probs_are_those_of_the_server_and_the_tail_is_what_is_left(stage: Stage) -> None:
    tokens = torch.randint(5, VOCAB, (16,), generator=torch.Generator().manual_seed(0)).numpy()
    starts, mask = (torch.zeros(16, dtype=torch.bool).numpy() for _ in range(2))
    starts[[0, 7, 13]], mask[:6], mask[7:10] = True, True, True
    for k in (1, 5, 20):
        with played(stage) as address:
            asked = ask(address, k=k)
            with closing(engines.Client(address)) as client:
                said = asked.top_logprobs(client, (tokens, starts, mask), k)
        assert said.places.tolist() == [0, 1, 2, 3, 4, 5, 7, 8, 9]
        # of the last document nothing counts, of the one before what comes behind is not sent
        assert stage.asked[-1][1]["prompt"] == [tokens[:7].tolist(), tokens[7:11].tolist()]
        logits = torch.cat(
            [
                stage.model.logits(stage.model.hidden(ids[None], torch.arange(len(ids))[None]))[0]
                for ids in (torch.tensor(tokens[:6]), torch.tensor(tokens[7:10]))
            ]
        ).double()
        exact = logits.log_softmax(-1)
        values, ids = exact.topk(k)
        assert torch.equal(torch.from_numpy(said.ids), ids)
        torch.testing.assert_close(torch.from_numpy(said.logprobs), values, rtol=0, atol=1e-5)
        rest = exact.exp().scatter(1, ids, 0.0).sum(1)
        torch.testing.assert_close(torch.from_numpy(said.tail), rest, rtol=0, atol=1e-6)


def test_the_whole_vocabulary_leaves_no_tail(stage: Stage, tmp_path: Path) -> None:
    stage.most = VOCAB
    with played(stage) as address:
        build(ask(address, k=VOCAB), tmp_path / "c", top_k=VOCAB)
    batch = TeacherCache.open(tmp_path / "c").batch(range(3))
    assert (batch.tail_logprob[batch.mask] == -torch.inf).all()
    sums = batch.topk_logprobs[batch.mask].exp().sum(-1)
    torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-4)


def test_a_tail_below_float32_is_no_more_than_the_last_token_allows(stage: Stage, tmp_path) -> None:
    stage.model.model.lm_head.weight.data *= 20
    with played(stage) as address:
        build(ask(address), tmp_path / "c")
    batch = TeacherCache.open(tmp_path / "c").batch(range(5))
    tail, last = batch.tail_logprob[batch.mask], batch.topk_logprobs[batch.mask][:, -1]
    assert torch.isfinite(tail).all() and tail.min() < -20
    assert (tail <= last + torch.tensor(VOCAB - 5).log() + 0.1).all()


# The real engine's own words.


def test_what_vllm_said_is_what_its_teacher_says_here(tmp_path: Path) -> None:
    replay = Replay(RECORDED)
    with played(replay) as address:
        served_cache = recorded_build(address, tmp_path / "served")
    assert replay.missing == []
    check_equal(served_cache, recorded_build(recorded_teacher(), tmp_path / "local"))


# What goes wrong before anything is built.


@contextmanager
def refused(words: str, kind: type[QatError] = ConfigError) -> Iterator[None]:
    with pytest.raises(kind, match=words) as caught:
        yield
    assert "\n" not in str(caught.value)


def test_fewer_log_probs_than_wished_are_refused_with_what_raises_their_number(stage) -> None:
    limit = r"400 Bad Request \(Requested prompt logprobs of 21, .*: 20\).*--max-logprobs 21"
    with played(stage) as address, refused(limit):
        ask(address, k=21)
    fewer = "gives log-probs of 20 tokens at a position, expected 21"
    with played(Stage("sglang")) as address, refused(fewer, CacheError):
        ask(address, k=21)
    stage.change = lambda answer: [choice.pop("prompt_logprobs") for choice in answer["choices"]]
    none = "gives log-probs of 0 tokens of a prompt, expected"
    with played(stage) as address, refused(none, CacheError):
        ask(address)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_a_server_without_the_route_is_told_of_the_route(stage: Stage, engine: str) -> None:
    stage.engine, stage.statuses = engine, [404]
    route = {"vllm": "/v1/completions", "sglang": "/generate", "llamacpp": "/completion"}[engine]
    words = f"{route} answers 404 Not Found .*, expected .*'s route that gives log-probs of a prom"
    with played(stage) as address, refused(words):
        ask(address)


def test_another_model_tokenizer_or_vocabulary_is_refused(stage: Stage) -> None:
    with played(stage) as address:
        with refused("serves tiny, expected other; name one of them as --teacher-model"):
            ServedTeacher(address, "other", VOCAB).check(TOKENIZER, 16, 5)
        with refused(r"other tokenizer: .The 12 .* is \[(\d+, ){7}\d+\] \(\d+ in all\) there and"):
            ServedTeacher(address, NAME, VOCAB).check(tiny_tokenizer(270), 16, 5)
        with refused("gives the token [0-9]+, expected one of the 280 words", CacheError):
            ServedTeacher(address, NAME, 280).check(TOKENIZER, 64, 5)
        with refused("sequence_length=128, but .* reads at most 127 tokens and the one"):
            ask(address, length=128)


def test_a_tokenizer_that_nobody_tells_is_a_warning(stage: Stage, monkeypatch, caplog) -> None:
    monkeypatch.setattr(Stage, "_ids", lambda self, text: None)
    with played(stage) as address:
        ask(address)
    assert "does not tell how it tokenises" in caplog.text


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
@pytest.mark.parametrize("shift", [3.0, -9.0, float("-inf"), float("nan")])
def test_what_is_no_distribution_is_refused(engine: str, shift: float) -> None:
    stage = Stage(engine)

    def shifted(part: object) -> None:
        """Move every log-prob in an answer, in the places where its engine has them."""
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            is_top = engine == "sglang" and isinstance(part, list) and key == 0
            if isinstance(value, float) and (key == "logprob" or is_top):
                part[key] = value + shift
            elif isinstance(value, dict | list):
                shifted(value)

    stage.change = shifted
    with played(stage) as address, refused("probabilities|answers what no|sum to", CacheError):
        ask(address)


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_a_server_that_drips_its_answer_is_left(head: bytes, monkeypatch) -> None:
    monkeypatch.setattr(engines, "RESPONSE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip() -> None:
            connection, _ = server.accept()
            with connection, suppress(OSError):
                connection.sendall(head)
                while True:
                    connection.sendall(b" ")
                    time.sleep(0.05)

        threading.Thread(target=drip, daemon=True).start()
        client = engines.Client(f"http://127.0.0.1:{server.getsockname()[1]}/v1", attempts=1)
        with refused("sent no whole answer in 0.5 s", CacheError):
            client.ask("models", None, engines.MODELS, 2**20)


@pytest.mark.parametrize("place", ["", "/nowhere/v1"])
def test_what_is_no_such_server_is_one_line(stage: Stage, place: str) -> None:
    with played(stage) as address:
        wrong = address.replace("/v1", place)
        with refused("models|answers 404|what no engine", (ConfigError, CacheError)):
            ask(wrong)
    stage.change = lambda answer: answer.update(choices="many")
    with played(stage) as address, refused("what no engine known here does .choices", QatError):
        ask(address)
    with refused(r"/models: .*, 3 times, expected an answer; check --teacher, or run", CacheError):
        ask(address)  # nobody is there any more


def test_an_answer_without_end_is_left(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "ANSWER_BYTES", 50)
    with played(stage) as address, refused("sends more than 50 bytes", CacheError):
        ask(address)


def test_a_server_that_leads_elsewhere_is_not_followed(stage: Stage) -> None:
    other = Stage()
    with played(other) as there, played(stage) as address:
        stage.statuses, stage.headers = [307], {"Location": f"{there}/completions"}
        with refused("leads to http://127.0.0.1:[0-9]+/v1/completions, which is not followed"):
            ask(address)
    assert other.asked == []


def test_settings_that_no_server_can_follow_are_refused() -> None:
    def config(teacher: str = "http://h:1/v1", **values: object) -> CacheConfig:
        return CacheConfig(data="d", teacher=teacher, **{"teacher_model": "m", **values})

    assert config("http://h:1/v1/").teacher == "http://h:1/v1"
    assert config().described_by == "m" and config(tokenizer="t").described_by == "t"
    for values, words in [
        ({"draws": 5}, "draws=5, but a server gives its likeliest tokens alone"),
        ({"teacher_model": None}, "set --teacher-model"),
        ({"dtype": "fp32"}, "dtype=fp32, but who started http://h:1/v1 decided"),
        ({"device_map": "auto"}, "drop --device-map"),
        ({"teacher": "dir"}, "teacher_model=m says what a server has, but teacher=dir"),
        ({"teacher": "dir", "teacher_model": None, "tokenizer": "t"}, "drop --tokenizer"),
    ]:
        with refused(words):
            config(**values)
    for address in ("http://me:hunter2hunter2@h/v1", "http://h/v1?key=hunter2", "http:///v1"):
        with pytest.raises(ConfigError, match="expected one without a user, a password") as caught:
            config(address)
        assert "hunter2" not in str(caught.value)


def test_a_name_that_only_the_server_knows_needs_a_tokenizer() -> None:
    words = ["--teacher", "http://h:1/v1", "--teacher-model", "alias", "--data", "stdlib"]
    with refused("alias does not exist; .*; or name its tokenizer and config.json with --tok"):
        run_verb(["cache", *words])


# What goes wrong while it is built.


def test_a_busy_server_is_asked_again_and_the_bytes_are_the_same(stage, tmp_path, caplog) -> None:
    caplog.set_level("INFO", logger="qat")
    with played(stage) as address:
        asked = ask(address)
        build(asked, tmp_path / "whole")
        stage.statuses, stage.headers = [429, 503, 500, 502, 429], {"Retry-After": "0"}
        build(asked, tmp_path / "disturbed")
        assert stage.statuses == []
    assert contents(tmp_path / "whole") == contents(tmp_path / "disturbed")
    # several requests are refused at a time, and the first that is says so
    assert re.search(r"(429|50\d) [A-Z][\w ]+ \(no; you sent\); asking again in", caplog.text)


def test_a_server_that_asks_for_time_gets_it(stage: Stage, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(web, "LONGEST_S", 1.0)
    with played(stage) as address:
        asked = ask(address)
        stage.statuses, stage.headers = [429], {"Retry-After": "1"}
        began = time.monotonic()
        build(asked, tmp_path)
        assert time.monotonic() - began > 0.95


def test_a_build_that_a_server_ends_goes_on_with_it_later(stage: Stage, tmp_path: Path) -> None:
    with played(stage) as address:
        asked = ask(address)
        build(asked, tmp_path / "whole", shard_size=4)
        count = []

        def fails(answer: object) -> None:
            count.append(1)
            stage.statuses = [500] * 100 if len(count) > 9 else []

        stage.change = fails
        with refused(
            "500 Internal Server Error .*, 10 times, .*: finished shards are kept", CacheError
        ):
            build(asked, tmp_path / "c", shard_size=4)
        begun = set(contents(tmp_path / "c"))
        assert 2 <= len(begun) < len(contents(tmp_path / "whole"))
        stage.change, stage.statuses = (lambda answer: None), []
        before = len(stage.asked)
        build(asked, tmp_path / "c", shard_size=4)
        assert contents(tmp_path / "c") == contents(tmp_path / "whole")
        rows = sum(shard.sequences for shard in TeacherCache.open(tmp_path / "c").manifest.shards)
        assert len(stage.asked) - before < rows  # what was there is not asked about again
        assert not list((tmp_path / "c").glob("*.tmp"))


def test_a_build_goes_on_with_no_other_model(stage: Stage, tmp_path: Path) -> None:
    with played(stage) as address:
        asked = ask(address)
        whole = build(asked, tmp_path, shard_size=4)
        begun = whole.model_copy(update={"state": "building", "shards": whole.shards[:1]})
        (tmp_path / "manifest.json").write_bytes(begun.to_bytes())
        before = contents(tmp_path)
        stage.model = teacher(seed=1)
        with refused("answers otherwise than .* says of its first sequence .KL", CacheError):
            build(asked, tmp_path, shard_size=4)
        assert contents(tmp_path) == before


def test_a_refusal_in_the_middle_is_one_line(stage: Stage, tmp_path: Path) -> None:
    with played(stage) as address:
        asked = ask(address)
        stage.statuses = [404] * 50
        with refused("the server answers 404 Not Found .*; finished shards are kept", CacheError):
            build(asked, tmp_path)


def test_a_slow_server_is_asked_again_and_then_left(stage: Stage, monkeypatch, tmp_path) -> None:
    with played(stage) as address:
        asked = ask(address)
        monkeypatch.setattr(engines, "ANSWER_S", 0.05)
        monkeypatch.setattr(engines, "ATTEMPTS", 3)
        stage.gate.clear()
        with refused("timed out|Timeout", CacheError):
            build(asked, tmp_path)
        stage.gate.set()


def test_leaving_does_not_wait_for_the_server(stage: Stage, tmp_path: Path) -> None:
    """The main thread is interrupted, as by Ctrl-C, while other threads wait for answers."""
    with played(stage) as address:
        asked = ask(address)
        stage.gate.clear()

        class Stop(BaseException):
            pass

        def documents() -> Iterator[str]:
            yield from texts()
            raise Stop

        began = time.monotonic()
        with pytest.raises(Stop):
            build(asked, tmp_path, shard_size=4, documents=documents())
        assert time.monotonic() - began < 10
        stage.gate.set()
    assert not [t for t in threading.enumerate() if t.name.startswith("ThreadPoolExecutor")]


# Keys.


def test_a_key_goes_to_the_server_and_nowhere_else(
    stage: Stage,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="qat")
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(texts()))
    stage.key = "pw-1"  # so short that nothing else hides it
    command = ["qat", "cache", "--teacher", "ADDRESS", "--teacher-model", NAME, "--device", "cpu"]
    command += ["--tokenizer", str(model), "--data", str(text), "--top-k", "5"]
    command += ["--sequence-length", "16", "--out", str(tmp_path / "c")]

    def run(address: str) -> tuple[int, str]:
        command[3] = address
        monkeypatch.setattr("sys.argv", command)
        try:
            main()
        except SystemExit as stop:
            return int(stop.code or 0), "".join(capsys.readouterr())
        return 0, "".join(capsys.readouterr())

    with played(stage) as address:
        code, printed = run(address)
        assert code == 1 and f"wants a key, and {KEY} has none" in printed
        monkeypatch.setenv(KEY, "pw-2")
        code, printed = run(address)
        assert code == 1 and "refuses the key in" in printed and "pw-2" not in printed
        assert not (tmp_path / "c").exists()
        monkeypatch.setenv(KEY, "pw-1")
        stage.statuses = [500, 503]
        code, printed = run(address)
        assert code == 0 and "pw-1" not in printed + caplog.text
    assert "no; you sent [hidden]" in caplog.text
    assert "Bearer pw-1" in stage.keys
    written = [path.read_bytes() for path in (tmp_path / "c").iterdir()]
    assert len(written) == 3 and not any(b"pw-1" in each for each in written)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_bytes())
    assert manifest["teacher"]["name"] == NAME and "127.0.0.1" not in json.dumps(manifest)
    assert manifest["teacher"]["identity"].startswith("unknown, served as ")


@pytest.mark.parametrize(
    ("address", "shows"),
    [
        ("http://localhost:1/v1", False),
        ("https://far.example/v1", False),
        ("http://far.example/v1", True),
    ],
)
def test_a_key_over_an_open_line_is_told(address: str, shows: bool, monkeypatch, caplog) -> None:
    monkeypatch.setenv(KEY, "a-key-of-a-server")
    monkeypatch.setattr(engines.Client, "_attempt", lambda *_: b"{}")
    with pytest.raises(CacheError):
        ask(address)
    assert ("the key in QAT_TEACHER_API_KEY goes there without encryption" in caplog.text) is shows
    assert "a-key" not in caplog.text


def test_a_key_that_no_request_can_carry_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "half\nother-half")
    with pytest.raises(ConfigError, match="holds characters that no request can carry") as caught:
        engines.Client("http://h/v1")
    assert "half" not in str(caught.value)
