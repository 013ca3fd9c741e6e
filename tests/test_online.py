"""The messages about a name that only a hub could know, without a request to one."""

from pathlib import Path

import httpx2
import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from qat.errors import HubError
from qat.online import is_online


@pytest.fixture(autouse=True)
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[object]:
    """Answers of the hub, given in turn; what is an exception is raised. Nothing is remembered."""
    answers: list[object] = []

    def repo_info(_: HfApi, name: str, *, repo_type: str, timeout: float) -> object:
        assert (name, repo_type) in {("a/b", "model"), ("a/b", "dataset")} and timeout <= 5
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    is_online.cache_clear()
    monkeypatch.setattr(HfApi, "repo_info", repo_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    yield answers
    is_online.cache_clear()
    assert answers == []


def refusal(code: int) -> HfHubHTTPError:
    answer = httpx2.Response(code, request=httpx2.Request("GET", "https://hub"))
    return HfHubHTTPError("no", response=answer)


def test_a_known_name_is_asked_for_once(hub: list[object]) -> None:
    hub.append(object())
    assert is_online("a/b") and is_online("a/b")


@pytest.mark.parametrize("code", [401, 403, 404])
def test_an_unknown_name_is_one_line(hub: list[object], code: int) -> None:
    hub.append(refusal(code))
    with pytest.raises(HubError, match=f"the hub shows no such model .answer {code}.; check") as e:
        is_online("a/b")
    assert "\n" not in str(e.value)


def test_a_busy_hub_is_left_to_the_library(hub: list[object]) -> None:
    hub.append(refusal(503))
    assert is_online("a/b")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx2.ConnectError("[Errno -2] Name or service not known"), "Name or service"),
        (httpx2.ConnectTimeout(""), "ConnectTimeout"),
        (TimeoutError("timed out"), "timed out"),
    ],
)
def test_nobody_answers_is_one_line(hub: list[object], answer: object, reason: str) -> None:
    hub.append(answer)
    with pytest.raises(HubError, match=f"a/b is no path here, and .*{reason}.*; check the path"):
        is_online("a/b", "dataset")


def test_a_kept_copy_serves_where_nobody_answers(hub: list[object], tmp_path: Path, caplog) -> None:
    (tmp_path / "models--a--b" / "snapshots").mkdir(parents=True)
    hub.append(TimeoutError("timed out"))
    assert not is_online("a/b")
    assert "a/b: timed out; using the copy in" in caplog.text


def test_what_no_hub_can_be_asked_for_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the library refuses the name before it asks anybody
    with pytest.raises(HubError, match="can have that name .Repo id must") as caught:
        is_online("a/b/c")
    assert "\n" not in str(caught.value)


def test_offline_mode_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        is_online("a/b")
