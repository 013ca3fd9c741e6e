"""No token, key or password survives scrubbing; nothing else is touched."""

import io
import logging
from pathlib import Path

import pytest

from qat.cli import main
from qat.secrets import HIDDEN, Scrub, scrubbed, scrubbed_in, secret
from qat.train.config import TrainConfig
from qat.train.run import RunDirectory, resolved

SECRETS = {
    "HF_TOKEN": "plain-value-of-a-hub",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "AWS_SECRET_ACCESS_KEY": "wJalr/K7MDENG+bPxRfiCYEXAMPLEKEY",
    "GITHUB_PAT": "what-a-user-made-there",
    "STORAGE_KEY": "what-a-bucket-asks-for",
}


def test_what_looks_like_a_secret_is_hidden() -> None:
    for text, hidden in (
        ("login hf_" + "aB3" * 11, "aB3aB3"),
        ("key sk-proj-" + "x9" * 12, "x9x9"),
        ("id AKIA" + "Q7" * 8, "Q7Q7"),
        ("ghp_" + "Zz1" * 12, "Zz1"),
        ("Authorization: Bearer ab.cd-ef", "ab.cd"),
        ("https://me:pass@host/x", "me:pass"),
        ("https://me:p@ss@host/x", "p@ss"),
        ("Authorization: Basic bWU6cGFzcw==", "bWU6"),
        ("proxy said 'Basic bWU6cGFzc3dvcmQ='", "bWU6"),
        ('{"authorization": "Digest abcdefgh"}', "abcdefgh"),
        ("https://maps/x?key=AIza" + "Sy0_" * 9, "Sy0_"),
        ("password=p@ss:w0rd!", "w0rd"),
        ("dckr_pat_" + "Zz1" * 8, "Zz1"),
        ("s3://bucket/x?token=deadbeef01&y=1", "deadbeef"),
        ("https://b/x?X-Amz-Signature=0a1b2c3d4e&z=2", "0a1b2c"),
        ('{"api_key": "0123456789abcdef"}', "01234567"),
        ("GITHUB_PAT=abcdefgh12345678", "abcdefgh"),
        ("export STRIPE_KEY='abcdefghij'", "abcdefghij"),
        ("WANDB_KEY: 1234567890", "12345678"),
        ("stripe_key = abcdefghij", "abcdefghij"),
        ('{"stripe-key": "abcdefghij"}', "abcdefghij"),
        ("AWS_ACCESS_KEY_ID = notanid12", "notanid"),
        ("SOME_SECRET=abcdefghij AND_TOKEN=klmnopqrst", "klmnop"),
        ("qat train --wandb-api-key 0123456789abcdef0123", "01234567"),
        ("--stripe-key abcdefghij --more", "abcdefghij"),
        ("['login', '--hub-token', 'abcdefghij']", "abcdefghij"),
        ('"--password", "p@ss/w0rd!"', "w0rd"),
        ("basic dXNlcjpwYXNzd29yZA==", "dXNlcj"),
        ("BASIC QWxhZGRpbjpvcGVu", "QWxhZG"),
        ("Basic QWxhZGRpbjpvcGVu", "QWxhZG"),
        ("https://user:p/ss@host/x", "ss"),
        ("postgres://u:p#q@h", "p#q"),
        ("https://user:p?a/b@c#d@host/x", "c#d"),
    ):
        found = scrubbed(text)
        assert hidden not in found and HIDDEN in found
        assert scrubbed(found) == found


def test_what_is_none_stays() -> None:
    for text in (
        "https://example.org/a@b",
        "caches/c4_k64: 5 tokens, tokenizer 0123456789abcdef0123456789abcdef",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
        "tokens_per_s=1200.5 token 151643 of 151936",
        "Basic training of a model; https://example.org/x?to=a@b.c",
        "rebuild with --top-k 64; 'qat cache' (skip-connections-are-fine)",
        "a basic understanding of basic TensorFlow and of Basic Quantization",
        "http://localhost:8080/a@b https://host:443/x?to=a@b.c http://[::1]:8080/x@y",
        "--max-new-tokens 12345678 --key-frames 12345678 --hub-token --another-flag",
        "key: abcdefghij; monkey=abcdefghij; tokens=abcdefghij; a_path=abcdefghij",
        "git@github.com:owner/name",
        "nats_per_token=2.345678901 layers.0.pool_key: bfloat16, expected float32",
    ):
        assert scrubbed(text) == text


def test_values_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    text = scrubbed(" abc ".join(SECRETS.values()))
    assert text == " abc ".join([HIDDEN] * len(SECRETS))
    assert scrubbed_in({"a": [1, {"b": SECRETS["GITHUB_PAT"]}]}) == {"a": [1, {"b": HIDDEN}]}


def test_only_what_is_called_a_secret_is_read_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRETS["HF_TOKEN"])
    monkeypatch.setenv("EMPTY_KEY", "")
    assert secret("HF_TOKEN") == SECRETS["HF_TOKEN"]
    assert secret("EMPTY_KEY") is None and secret("UNSET_KEY") is None
    with pytest.raises(AssertionError):  # a value that `scrubbed` would not know
        secret("HOME")


def test_log_lines_and_tracebacks_are_scrubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRETS["HF_TOKEN"])
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(Scrub())
    logger = logging.getLogger("scrubbed-here")
    logger.addHandler(handler)
    try:
        raise OSError(f"with {SECRETS['HF_TOKEN']}")
    except OSError:
        logger.exception("%s of %d", SECRETS["HF_TOKEN"], 3)
    finally:
        logger.removeHandler(handler)
    assert SECRETS["HF_TOKEN"] not in stream.getvalue()
    assert f"{HIDDEN} of 3" in stream.getvalue() and "Traceback" in stream.getvalue()


def test_a_run_and_its_errors_hold_no_secret(tmp_path: Path, monkeypatch, capsys) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    everything = "-".join(SECRETS.values())
    run = RunDirectory(tmp_path / "run")
    settings = TrainConfig(cache_dir=everything, sample_prompt=everything)
    run.begin(resolved(settings, everything))
    run.write_facts(student=everything, cache=f"s3://me:pass@bucket/{everything}")
    command = ["qat", "train", everything, "--cache-dir", everything, "--out", f"{tmp_path}/other"]
    monkeypatch.setattr("sys.argv", command)
    with pytest.raises(SystemExit):
        main()
    printed = capsys.readouterr()
    written = [path.read_bytes().decode() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) >= 2 and HIDDEN in printed.err
    for text in (printed.err, printed.out, *written):
        assert not [value for value in SECRETS.values() if value in text]
        assert "me:pass" not in text
