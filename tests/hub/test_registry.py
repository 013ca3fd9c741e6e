"""Names: those of the package, a user's own, and those that nobody knows."""

from pathlib import Path

import pytest
from hub_case import checkpoint

from qat.errors import ConfigError, HubError
from qat.hub.files import sha256_tree
from qat.hub.registry import REPOSITORY, HubEntry, add_entry, find, load_registry, user_file

CACHES = {"L64", "L128"}
CHECKPOINTS = {"q4_fp32", "q4_fp16", "q2_init", "q2_best", "q2_0.53", "sr-002", "tiny"}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "config" / "hub.toml"


def entry(**values: object) -> HubEntry:
    return HubEntry.model_validate({"kind": "cache", "mirrors": ["drive:a"], **values})


def test_the_packaged_names(own: Path) -> None:
    registry = load_registry(own)
    assert set(registry) == CACHES | CHECKPOINTS
    assert registry["L64"].mirrors == ("drive:qwen3_caches/alpaca_chat_think_both_L64_K64_R128",)
    assert {name for name in registry if registry[name].kind == "cache"} == CACHES
    assert user_file().name == "hub.toml"


def test_the_embedded_checkpoint_is_what_is_registered(own: Path) -> None:
    tiny = load_registry(own)["tiny"]
    assert tiny.mirrors == (str(REPOSITORY / "checkpoints" / "tiny-qwen3"),)
    assert sha256_tree(Path(tiny.mirrors[0])) == tiny.tree_sha256


def test_an_unknown_name_has_neighbours(own: Path) -> None:
    for name, near in (
        ("l64", "'L64'"),
        ("q2-best", "'q2_best'"),
        ("q4_fp", "'q4_fp32'"),
        ("zzzzzz", "there are L128, L64, q2_0.53"),
    ):
        with pytest.raises(HubError, match=f"'{name}'; .*{near}"):
            find(load_registry(own), name)


def test_a_users_own_names(own: Path, tmp_path: Path, monkeypatch) -> None:
    checkpoint(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    add_entry(own, "mine", entry(mirrors=["mine", "hf:me/mine"], size=5, sha256="0" * 64))
    add_entry(own, "q2_1.5", entry())
    registry = load_registry(own)
    assert registry["mine"].mirrors == (str(tmp_path / "mine"), "hf:me/mine")
    assert registry["mine"].size == 5 and registry["q2_1.5"] == entry()
    with pytest.raises(HubError, match="'mine' is in the registry already"):
        add_entry(own, "mine", entry())
    with pytest.raises(HubError, match="'tiny' is in the registry already"):
        add_entry(own, "tiny", entry())
    add_entry(own, "tiny", entry(note="my own"), replace=True)
    assert load_registry(own)["tiny"].note == "my own"
    assert [path.name for path in own.parent.iterdir()] == ["hub.toml"]


def test_a_name_has_to_be_a_directorys_name(own: Path) -> None:
    for name in ("", "../x", "a/b", ".hidden", "a b", "x" * 200):
        with pytest.raises(HubError, match="as a directory is called so"):
            add_entry(own, name, entry())
        assert not own.exists()


def test_a_users_file_is_checked(own: Path) -> None:
    for text, message in (
        ("[a", "is not TOML"),
        ("a = 1", "'a' must be a table"),
        ("['../a']\nkind = 'cache'\nmirrors = ['b']", "'../a' must be a table"),
        ("[a]\nkind = 'model'\nmirrors = ['b']", r"\[a\]: kind='model': Input should be 'cache'"),
        ("[a]\nkind = 'cache'\nmirrors = []", "mirrors"),
        ("[a]\nkind = 'cache'\nmirrors = ['ftp://b']", "'ftp://b' starts with none of drive:"),
        ("[a]\nkind = 'cache'\nmirrors = ['http://b']", "anybody can change what http:// sends"),
        ("[a]\nkind = 'cache'\nmirrors = ['b']\nsha256 = '12'", "sha256='12'"),
        ("[a]\nkind = 'cache'\nmirrors = ['b']\nsize = -1", "size=-1"),
        ("[a]\nkind = 'cache'\nmirrors = ['b']\nurl = 'c'", "url is unknown; known are"),
    ):
        own.parent.mkdir(exist_ok=True)
        own.write_text(text)
        with pytest.raises((HubError, ConfigError), match=message):
            load_registry(own)


def test_a_secret_is_not_kept(own: Path) -> None:
    for mirror in ("https://me:pass@host/a.tgz", "https://host/a?token=0123456789"):
        with pytest.raises(HubError, match=r"\[hidden\].* holds a secret") as caught:
            add_entry(own, "mine", entry(mirrors=["drive:a", mirror]))
        assert "pass@" not in str(caught.value) and "0123456789" not in str(caught.value)
        assert not own.exists()
