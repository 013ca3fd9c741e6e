"""Model repositories of the Hugging Face hub, `hf://owner/name`: pulled, and pushed in one commit.

Only this file moves files by `huggingface_hub`, whose own login is used: no token is passed here.
"""

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx2
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    get_token,
    snapshot_download,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.hf_api import ModelInfo
from huggingface_hub.utils import are_progress_bars_disabled as has_no_bars
from huggingface_hub.utils import disable_progress_bars, enable_progress_bars, validate_repo_id
from huggingface_hub.utils import logging as hf_logging

from qat.errors import HubError
from qat.hub.files import REPOSITORY
from qat.hub.web import status_of
from qat.secrets import scrubbed

OF_HUB = ".gitattributes"
"""The file that the hub itself writes into a repository."""
LOGIN = "run 'hf auth login' with a token that may write"
ANSWERS = {
    401: ("does not accept this login, expected a valid one", LOGIN),
    403: ("gives this login no right to write, expected it", LOGIN),
    404: ("shows no such repository, expected one", "check the name, or log in by 'hf auth login'"),
    409: (
        "is in conflict, expected a repository of models that nobody else changes meanwhile",
        "look what is there, and call again or choose another name",
    ),
}
"""The meaning of each HTTP status of the hub, and what the user can do."""
LONGEST_REASON = 200


class Pushed(NamedTuple):
    """A commit that was pushed."""

    url: str
    commit: str
    files: int
    bytes: int


def download(address: str, place: Path) -> None:
    """Download the repository `owner/name[@revision]` into the directory `place`.

    Raises:
        HubError: there is none, or it cannot be downloaded.
    """
    name, _, revision = address.partition("@")
    with _one_line(name):
        snapshot_download(
            name, revision=revision or None, local_dir=place, ignore_patterns=[OF_HUB]
        )
    shutil.rmtree(place / ".cache", ignore_errors=True)  # notes of the library for a resume


def check_push(name: str, *, private: bool = False, replace: bool = False) -> ModelInfo | None:
    """Check the login, the name `owner/name` and what is there already; None if that is nothing.

    Raises:
        HubError: nothing could be pushed there.
    """
    with _one_line(name):
        validate_repo_id(name)
        owner, slash, _ = name.partition("/")
        if not slash:
            raise HFValidationError("it has no owner")
        if get_token() is None:
            raise HubError(
                f"{REPOSITORY}{name} needs a login and there is none here, expected one; {LOGIN}"
            )
        api = HfApi()
        who = api.whoami()
        owners = [who["name"], *(each["name"] for each in who.get("orgs", ()))]
        if owner.casefold() not in map(str.casefold, owners):
            raise HubError(
                f"{REPOSITORY}{name} belongs to {owner}, expected {' or '.join(owners)}, where "
                f"this login may write; choose one of these, or {LOGIN}"
            )
        try:
            found = api.model_info(name)
        except RepositoryNotFoundError:
            return None
    if private and not found.private:
        raise HubError(
            f"{REPOSITORY}{name} is public, expected a private one; make it private on the hub, or "
            "choose another name"
        )
    if (held := _names(found)) and not replace:
        raise HubError(
            f"{REPOSITORY}{name} holds {len(held)} files ({min(held)}), expected none; choose "
            f"another name, or replace them: qat hub push DIR {REPOSITORY}{name} --force"
        )
    return found


def push_files(
    files: Mapping[str, Path | bytes],
    name: str,
    *,
    message: str,
    private: bool = False,
    replace: bool = False,
) -> Pushed:
    """Push `files` by their paths in the repository `owner/name`, which then holds nothing else.

    All is one commit, so that a push that fails leaves what was there; a new repository is empty.

    Raises:
        HubError: they cannot be pushed, or the hub lists other sizes afterwards.
    """
    found, api = check_push(name, private=private, replace=replace), HfApi()
    stale = _names(found) - files.keys() if found else set()
    with _one_line(name):
        made = api.create_repo(name, private=private or None, exist_ok=True)
        if made.repo_type != "model":
            raise HubError(
                f"{REPOSITORY}{name} is a {made.repo_type}, expected a repository of models; "
                "choose another name"
            )
        adds = [
            CommitOperationAdd(path, str(file) if isinstance(file, Path) else file)
            for path, file in files.items()
        ]
        deletes = [CommitOperationDelete(path) for path in sorted(stale)]
        commit = api.create_commit(
            name,
            [*deletes, *adds],
            commit_message=message,
            parent_commit=found.sha if found else None,
        )
        now = api.model_info(name, revision=commit.oid, files_metadata=True)
    sent = {add.path_in_repo: add.upload_info.size for add in adds}
    there = {each.rfilename: each.size for each in now.siblings or () if each.rfilename != OF_HUB}
    if wrong := sorted(path for path in sent.keys() | there if sent.get(path) != there.get(path)):
        raise HubError(
            f"{REPOSITORY}{name} holds {there.get(wrong[0])} bytes of {wrong[0]} after the push, "
            f"expected {sent.get(wrong[0])}; push again"
        )
    return Pushed(str(made), commit.oid, len(sent), sum(sent.values()))


def _names(found: ModelInfo) -> set[str]:
    return {each.rfilename for each in found.siblings or ()} - {OF_HUB}


@contextmanager
def _one_line(name: str) -> Iterator[None]:
    """Turn what `huggingface_hub` raises inside the block into a `HubError`.

    Its log is quiet meanwhile, as it shows whole addresses, which may be signed, and so are its
    bars where no terminal shows them.
    """
    verbosity, hides = hf_logging.get_verbosity(), not (has_no_bars() or sys.stderr.isatty())
    hf_logging.set_verbosity_error()
    if hides:
        disable_progress_bars()
    try:
        yield
    except HFValidationError as error:
        raise HubError(
            f"{REPOSITORY}{name} is no name of a repository ({_words(error)}), expected "
            f"{REPOSITORY}OWNER/NAME; mend the name"
        ) from None
    # KeyError: an answer that lacks what the library reads
    except (httpx2.HTTPError, OSError, RuntimeError, ValueError, KeyError) as error:
        raise HubError(f"{REPOSITORY}{name}: {_reason(error)}") from None
    finally:
        hf_logging.set_verbosity(verbosity)
        if hides:
            enable_progress_bars()


def _reason(error: BaseException) -> str:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for each in chain:
        if isinstance(each, HfHubHTTPError):
            more = f" ({_words(each.server_message)})" if each.server_message else ""
            busy = f"failed{more}, expected it to work", "call again later"
            found, mend = ANSWERS.get(each.response.status_code, busy)
            return f"the hub {found} (answer {status_of(each.response)}); {mend}"
        if isinstance(each, httpx2.TransportError):
            return (
                f"the hub cannot be reached from here ({_words(each)}), expected a connection; "
                "check the network, and HF_ENDPOINT if you set it"
            )
    return f"huggingface_hub says {_words(chain[-1])}, expected success; call again later"


def _words(error: BaseException | str) -> str:
    return scrubbed(" ".join(str(error).split()))[:LONGEST_REASON] or type(error).__name__
