"""Reachability of a hub: one request per name with a short timeout, before anything is loaded."""

import logging
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Literal

from qat.errors import HubError

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Timeout of the request in seconds."""
UNKNOWN = {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN, HTTPStatus.NOT_FOUND}
"""Status codes of the hub for a name that it does not have, or does not show."""


@cache
def is_online(name: str, kind: Literal["model", "dataset"] = "model") -> bool:
    """Return whether to request `name` from the hub; false if only cached copies can be read.

    The libraries of the hub retry each file for up to a minute before they report a failure.

    Raises:
        HubError: the hub does not have it, or does not respond and there is no cached copy.
    """
    from huggingface_hub import constants

    error = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _hub_error(name, kind)
    if error is None:
        return True
    folder = Path(constants.HF_HUB_CACHE, f"{kind}s--{name.replace('/', '--')}", "snapshots")
    if kind == "model" and folder.is_dir():
        logger.warning("%s: %s; using the copy in %s", name, error, folder.parent)
        return False
    raise HubError(
        f"{name} is no path here, and {constants.ENDPOINT} cannot be asked for it ({error}); "
        f"check the path, or download the {kind} and name its directory"
    )


def snapshot(name: str, *, local_only: bool) -> Path:
    """Return the directory of the hub's model `name`, downloaded unless `local_only`.

    Raises:
        OSError: it is not on this disk, or cannot be downloaded.
        ValueError: no model of a hub can have that name.
    """
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, local_files_only=local_only))


def hub_file(name: str, file: str, *, local_only: bool) -> Path:
    """Return a file of the hub's model `name`, in a directory that is called after its commit.

    Raises:
        OSError: it is not on this disk, or cannot be downloaded.
        ValueError: no model of a hub can have that name.
    """
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, file, local_files_only=local_only))


def _hub_error(name: str, kind: str) -> str | None:
    """Return why the hub does not respond; None if it does."""
    import httpx2
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=PATIENCE_S)
    except HfHubHTTPError as error:
        code = error.response.status_code
        if code in UNKNOWN:
            raise HubError(
                f"{name} is no path here, and the hub shows no such {kind} (answer {code}); check "
                "the name, and for a private or gated one log in with 'hf auth login'"
            ) from None
    except HFValidationError as error:
        raise HubError(
            f"{name} is no path here, and no {kind} of a hub can have that name "
            f"({' '.join(str(error).split())}); check the name"
        ) from None
    except (OSError, httpx2.TransportError) as error:
        return " ".join(str(error).split()) or type(error).__name__
    return None  # also if the hub is busy: its library retries
