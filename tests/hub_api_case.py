"""A double of the Hugging Face hub: what `huggingface_hub` asks to push and to pull models."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit

import http_case
import pytest
from huggingface_hub import constants

LARGE = (".safetensors", ".gguf")
"""Suffixes of files that go to the storage of large files."""
GIVEN = {".gitattributes": b"*.safetensors filter=lfs\n"}
"""What the hub itself puts into a new repository."""
Files = dict[str, bytes]


class Hub:
    """The state of the double: repositories with their commits, and how it is to fail."""

    def __init__(self) -> None:
        self.url = ""
        self.user, self.orgs, self.token = "me", ["ours"], "hf_" + "x" * 20
        self.private: dict[str, bool] = {}
        self.commits: dict[str, list[tuple[str, Files]]] = {}
        self.messages: list[str] = []
        self.storage: Files = {}
        self.asked: list[str] = []
        """Method and path of every request."""
        self.statuses: dict[str, int] = {}
        """Status of the answers to requests that match a pattern."""
        self.loses: str | None = None
        """A file that commits leave out."""
        self.others: dict[str, str] = {}
        """Kind of a repository of that name that holds no models."""

    def add(self, name: str, files: Files) -> str:
        """Add a commit that leaves the repository `name` with these files, and return its id."""
        number = sum(map(len, self.commits.values()))
        oid = hashlib.sha1(f"{name} {number}".encode()).hexdigest()
        self.commits.setdefault(name, []).append((oid, files))
        return oid

    def files(self, name: str) -> Files:
        """Return the files of the last commit, without the hub's own."""
        return {k: v for k, v in self.commits[name][-1][1].items() if k not in GIVEN}

    def at(self, name: str, revision: str) -> tuple[str, Files] | None:
        """Return the commit `revision`."""
        commits = self.commits.get(name, [])
        named = [c for c in commits if revision in ("main", c[0])]
        return named[-1] if named else None


def listed(path: str, data: bytes) -> dict[str, Any]:
    """What the hub says of a file: its size and hashes, under all names that its clients read."""
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    found: dict[str, Any] = {"rfilename": path, "path": path, "type": "file", "size": len(data)}
    found |= {"blobId": blob, "oid": blob}
    if path.endswith(LARGE):
        digest = hashlib.sha256(data).hexdigest()
        found["lfs"] = {"sha256": digest, "oid": digest, "size": len(data), "pointerSize": 130}
    return found


class Handler(BaseHTTPRequestHandler):
    """Answers as the hub does, by the state in `hub`."""

    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet: two wait for each other's acknowledgement

    def handle_any(self) -> None:
        """Answer any request."""
        length = int(self.headers.get("Content-Length") or 0)
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        asked = f"{self.command} {path}"
        self.hub.asked.append(asked)
        for pattern, status in self.hub.statuses.items():
            if re.search(pattern, asked):
                return self.say(status, {"error": "as the test wishes"})
        is_known = self.headers.get("Authorization") == f"Bearer {self.hub.token}"
        if not is_known and not path.startswith("/storage/"):
            return self.say(401, {"error": "Invalid credentials in Authorization header"})
        for pattern, answer in ROUTES:
            if found := re.fullmatch(pattern, asked):
                return answer(self, body, *found.groups())
        return self.say(404, {"error": f"the double has no {asked}"})

    do_GET = do_HEAD = do_POST = do_PUT = handle_any  # noqa: N815

    def say(self, status: int, body: Any = None, **headers: str) -> None:
        """Send an answer; bytes as they are, the rest as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def who(self, _: bytes) -> None:
        """The owner of the token."""
        orgs = [{"name": name} for name in self.hub.orgs]
        self.say(200, {"type": "user", "name": self.hub.user, "orgs": orgs})

    def create(self, body: bytes) -> None:
        """Make a repository."""
        wished = json.loads(body)
        name = f"{wished['organization']}/{wished['name']}"
        if name in self.hub.others:
            kind = self.hub.others[name]
            return self.say(409, {"error": "exists", "url": f"{self.hub.url}/{kind}s/{name}"})
        if name in self.hub.commits:
            return self.say(409, {"error": "You already have it", "url": f"{self.hub.url}/{name}"})
        self.hub.private[name] = wished.get("visibility") == "private"
        self.hub.add(name, dict(GIVEN))
        return self.say(200, {"url": f"{self.hub.url}/{name}", "name": name})

    def info(self, _: bytes, name: str, revision: str | None) -> None:
        """A repository and its files."""
        found = self.hub.at(name, revision or "main")
        if found is None:
            return self.say(404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        siblings = [listed(*item) for item in found[1].items()]
        facts = {"id": name, "sha": found[0], "private": self.hub.private[name]}
        return self.say(200, {**facts, "tags": [], "siblings": siblings})

    def tree(self, _: bytes, name: str, revision: str) -> None:
        """The files of a commit."""
        self.say(200, [listed(*item) for item in self.hub.at(name, revision)[1].items()])

    def preupload(self, body: bytes, name: str) -> None:
        """Which files are large."""
        there = self.hub.at(name, "main")[1]
        modes = []
        for file in json.loads(body)["files"]:
            path = file["path"]
            old = listed(path, there[path]) if path in there else {}
            oid = old.get("lfs", old).get("oid")
            mode = "lfs" if path.endswith(LARGE) else "regular"
            modes.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.say(200, {"files": modes})

    def batch(self, body: bytes, _: str) -> None:
        """Where to send large files."""
        objects = json.loads(body)["objects"]
        for each in objects:
            if each["oid"] not in self.hub.storage:
                verify = {"href": f"{self.hub.url}/verify"}
                upload = {"href": f"{self.hub.url}/storage/{each['oid']}"}
                each["actions"] = {"upload": upload, "verify": verify}
        self.say(200, {"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        """Keep a large file."""
        if hashlib.sha256(body).hexdigest() != oid:
            return self.say(400, {"error": "another hash"})
        self.hub.storage[oid] = body
        return self.say(200)

    def verify(self, body: bytes) -> None:
        """Whether a large file has arrived."""
        wished = json.loads(body)
        found = self.hub.storage.get(wished["oid"])
        self.say(200 if found is not None and len(found) == wished["size"] else 422, {})

    def commit(self, body: bytes, name: str) -> None:
        """Add, replace and remove files at once."""
        oid, files = self.hub.at(name, "main")
        files = dict(files)
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
                if value.get("parentCommit", oid) != oid:
                    return self.say(412, {"error": "A commit has happened since"})
            elif line["key"] == "deletedFile":
                del files[value["path"]]
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.storage[value["oid"]]
            else:
                files[value["path"]] = base64.b64decode(value["content"])
        files.pop(self.hub.loses, None)
        oid = self.hub.add(name, files)
        return self.say(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid})

    def resolve(self, _: bytes, _method: str, name: str, revision: str, path: str) -> None:
        """A file."""
        found = self.hub.at(name, revision)
        if found is None:
            return self.say(404, {}, X_Error_Code="RepoNotFound")
        if path not in found[1]:
            return self.say(404, {}, X_Error_Code="EntryNotFound", X_Repo_Commit=found[0])
        told = listed(path, found[1][path])
        etag = f'"{told.get("lfs", told)["oid"]}"'
        return self.say(200, found[1][path], ETag=etag, X_Repo_Commit=found[0])

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES = (
    (r"GET /api/whoami-v2", Handler.who),
    (r"POST /api/repos/create", Handler.create),
    (r"POST /api/validate-yaml", lambda self, _: self.say(200, {"errors": [], "warnings": []})),
    (rf"GET /api/models/{NAME}(?:/revision/(\w+))?", Handler.info),
    (rf"GET /api/models/{NAME}/tree/(\w+)", Handler.tree),
    (rf"POST /api/models/{NAME}/preupload/main", Handler.preupload),
    (rf"POST /api/models/{NAME}/commit/main", Handler.commit),
    (rf"POST /{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    (r"PUT /storage/(\w+)", Handler.store),
    (r"POST /verify", Handler.verify),
    (rf"(GET|HEAD) /{NAME}/resolve/(\w+)/(.+)", Handler.resolve),
)


def header(card: str) -> dict[str, Any]:
    """Return the metadata of a card that `qat` wrote."""
    lines = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)[1].splitlines()
    return {key: json.loads(value) for key, _, value in (line.partition(": ") for line in lines)}


@contextmanager
def logged_in(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub for the block, to which `huggingface_hub` is logged in; its cache is below `place`."""
    with serving() as hub:
        # what HF_ENDPOINT, HF_HOME and HF_HUB_DISABLE_XET set when the library is imported
        resolve = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", resolve)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(place / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(place / "token"))
        monkeypatch.setattr(constants, "AGENT_HARNESSES_PATH", str(place / "agents"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it keeps an address
        monkeypatch.setattr("time.sleep", lambda _: None)  # pauses between attempts
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub on this machine for the time of the block."""
    hub = Hub()
    with http_case.serving(type("OneHub", (Handler,), {"hub": hub})) as hub.url:
        yield hub
