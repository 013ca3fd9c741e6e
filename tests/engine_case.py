"""Servers on this machine that play an engine: with a tiny teacher's words, or with recorded ones.

A `Stage` computes what the engine would say and can misbehave; a `Replay` repeats what a real one
said, request by request.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event, Lock
from typing import ClassVar

import torch
from cache_case import TOKENIZER, build, info, teacher, texts
from http_case import serving
from tiny import VOCAB, tiny_model

from qat.data.reader import TeacherCache
from qat.extensions.served.teacher import ServedTeacher
from qat.models.language_model import LanguageModel

NAME = "tiny"
SERVED = "unknown, served as 0123456789ab"
RECORDED = Path(__file__).parent / "data" / "served_vllm.json"
"""Answers of vLLM to `recorded_build`; test_served_teacher.py of its extension renews them."""
CONTEXT = 128
Said = tuple[int, dict | list | bytes]
"""An answer's status and content."""


class Stage:
    """One of the engines that `qat cache` knows, with a tiny teacher."""

    def __init__(self, engine: str = "vllm", model: LanguageModel | None = None) -> None:
        self.engine = engine
        self.model = model or teacher()
        self.tokenizer = TOKENIZER
        self.most = 20
        """The most log-probs that it gives at a position."""
        self.key = ""
        """The key that requests must carry; empty for none."""
        self.statuses: list[int] = []
        """Error statuses of the next answers about prompts."""
        self.headers: dict[str, str] = {}
        """Headers of those error answers."""
        self.change: Callable[[dict | list], object] = lambda answer: None
        """A change that is made to each answer about a prompt."""
        self.gate = Event()
        """Answers about prompts wait for it."""
        self.gate.set()
        self.asked: list[tuple[str, dict | None]] = []
        self.keys: set[str | None] = set()
        self.at_once = self.most_at_once = 0
        self._lock = Lock()

    def answer(self, path: str, body: dict | None, key: str | None) -> tuple[Said, dict[str, str]]:
        """Status, content and headers of an answer."""
        with self._lock:
            self.asked.append((path, body))
            self.keys.add(key)
        if self.key and key != f"Bearer {self.key}":
            return (401, {"error": {"message": f"{key} is not {self.key}"}}), {}
        if path == "/v1/models":
            card = {"id": NAME, "owned_by": self.engine, "max_model_len": CONTEXT}
            return (200, {"object": "list", "data": [card]}), {}
        if path == "/props":
            return (200, {"total_slots": 2, "default_generation_settings": {"n_ctx": 99}}), {}
        if path == "/tokenize":
            text = body.get("prompt") or body["content"]
            return (200, {"tokens": self._ids(text), "count": 3}), {}
        if path == "/v1/completions" and isinstance(body["prompt"], str):
            return (
                200,
                {"choices": [self._choice(0, {"prompt_token_ids": self._ids(body["prompt"])})]},
            ), {}
        with self._lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
            status = self.statuses.pop(0) if self.statuses else None
        self.gate.wait(20)
        try:
            return self._prompts(path, body, status)
        finally:
            with self._lock:
                self.at_once -= 1

    def _prompts(self, path: str, body: dict, status: int | None) -> tuple[Said, dict[str, str]]:
        if status is not None:
            return (status, {"error": {"message": f"no; you sent {self.key}"}}), self.headers
        say = {
            ("vllm", "/v1/completions"): self._vllm,
            ("sglang", "/generate"): self._sglang,
            ("llamacpp", "/completion"): self._llamacpp,
        }.get((self.engine, path))
        if say is None:
            return (404, {"detail": "Not Found"}), {}
        content = say(body)
        if isinstance(content, tuple):
            return content, {}
        self.change(content)
        return (200, content), {}

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _choice(self, index: int, more: dict) -> dict:
        return {"index": index, "text": "x", "finish_reason": "length", **more}

    @torch.no_grad()
    def _logprobs(self, ids: list[int]) -> torch.Tensor:
        """`(S, V)` float32."""
        places = torch.arange(len(ids))[None]
        hidden = self.model.hidden(torch.tensor([ids]), places)
        return torch.log_softmax(self.model.logits(hidden)[0].float(), -1)

    def _top(self, ids: list[int], k: int) -> Iterator[tuple[list[tuple[float, int]], float]]:
        """The k likeliest of each position but the last, and the log-prob of what follows."""
        for logprobs, following in zip(self._logprobs(ids), ids[1:], strict=False):
            values, tokens = logprobs.topk(k)
            yield [*zip(values.tolist(), tokens.tolist(), strict=True)], logprobs[following].item()

    def _vllm(self, body: dict) -> dict | Said:
        k = body["prompt_logprobs"]
        if k > self.most:
            message = f"Requested prompt logprobs of {k}, which is greater than max allowed: 20"
            return 400, {"error": {"message": message, "code": 400}}
        choices = []
        for index, ids in enumerate(body["prompt"]):
            said: list[dict | None] = [None]
            for (top, own), following in zip(self._top(ids, k), ids[1:], strict=False):
                entries = {following: own} | {token: value for value, token in top}
                said.append(
                    {
                        str(token): {"logprob": value, "rank": 1, "decoded_token": "\u00e9"}
                        for token, value in entries.items()
                    }
                )
            choices.append(self._choice(index, {"prompt_logprobs": said}))
        return {"choices": choices[::-1], "usage": {"prompt_tokens": 1}}

    def _sglang(self, body: dict) -> list:
        answers = []
        for ids in body["input_ids"]:
            said = [*self._top(ids, min(self.most, body["top_logprobs_num"]))]
            own = [
                [None, ids[0], None],
                *([p, i, None] for (_, p), i in zip(said, ids[1:], strict=True)),
            ]
            tops = [None, *([[p, i, None] for p, i in top] for top, _ in said)]
            meta = {"input_token_logprobs": own, "input_top_logprobs": tops, "id": "x"}
            answers.append({"text": "x", "meta_info": meta})
        return answers

    def _llamacpp(self, body: dict) -> dict:
        values, tokens = self._logprobs(body["prompt"])[-1].topk(min(body["n_probs"], self.most))
        top = [
            {"id": i, "token": "x", "bytes": [1], "logprob": p}
            for p, i in zip(values.tolist(), tokens.tolist(), strict=True)
        ]
        return {"content": "x", "completion_probabilities": [{"id": 1, "top_logprobs": top}]}


class Replay:
    """An engine that replays recorded answers in any order of requests."""

    def __init__(self, recorded: Path) -> None:
        self._said = {
            _key(each["path"], each["body"]): (each["status"], each["answer"])
            for each in json.loads(recorded.read_text(encoding="utf-8"))
        }
        self.missing: list[str] = []
        """Requests that are not in the recording."""

    def answer(self, path: str, body: dict | None, _: str | None) -> tuple[Said, dict[str, str]]:
        """Return the recorded answer to the same request."""
        asked = _key(path, body)
        if asked not in self._said:
            self.missing.append(asked)
        return self._said.get(asked, (400, {"error": {"message": "nobody recorded this"}})), {}


class Recorder:
    """Passes requests on to an engine and keeps what both say."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.exchange: list[dict] = []

    def answer(self, path: str, body: dict | None, key: str | None) -> tuple[Said, dict[str, str]]:
        """Return the engine's answer, and keep the exchange."""
        import httpx2

        how = {} if body is None else {"json": body}
        method = "GET" if body is None else "POST"
        answer = httpx2.request(method, self._root + path, timeout=120, **how)
        said = answer.json()
        self.exchange.append(
            {"path": path, "body": body, "status": answer.status_code, "answer": _kept(said)}
        )
        return (answer.status_code, said), {}


def check_equal(mine: TeacherCache, theirs: TeacherCache) -> None:
    """The same tokens, and where they count the same targets but for float32."""
    for split in ("train", "held_out"):
        rows = range(theirs.num_sequences(split))
        a, b = mine.batch(rows, split), theirs.batch(rows, split)
        assert len(a.mask) == mine.num_sequences(split) > 0
        assert all(torch.equal(x, y) for x, y in zip(a[:4], b[:4], strict=True))
        assert torch.equal(a.topk_ids[a.mask], b.topk_ids[a.mask])
        for x, y in zip(a[5:7], b[5:7], strict=True):
            # a distance at the edge of two codes may fall on either
            torch.testing.assert_close(x[a.mask], y[a.mask], rtol=0, atol=0.02)
            assert (x[a.mask] - y[a.mask]).abs().mean() < 1e-5


def recorded_teacher() -> LanguageModel:
    """The teacher that the real engine served."""
    model = tiny_model("qwen3", head_dim=64, num_hidden_layers=3, num_key_value_heads=2)
    model.lm_head.weight.data *= 20
    return LanguageModel(model)


def recorded_build(asked: LanguageModel | str, out: Path) -> TeacherCache:
    """A small cache of what that teacher, or who plays it at an address, says."""
    is_served = isinstance(asked, str)
    if is_served:
        asked = ServedTeacher(asked, NAME, VOCAB, 4)
        asked.check(TOKENIZER, 24, 4)
    about = info(identity=SERVED, dtype="unknown") if is_served else info()
    how = {"draws": 0, "top_k": 4, "sequence_length": 24, "batch_size": 0}
    build(out, teacher=asked, info=about, documents=texts(9), **how)
    return TeacherCache.open(out)


def _kept(said: object) -> object:
    """An answer without the names, times and places that are others each time."""
    if isinstance(said, list):
        return [*map(_kept, said)]
    if not isinstance(said, dict):
        return said
    by_chance = ("created", "permission", "root", "system_fingerprint", "text")
    kept = {name: _kept(value) for name, value in said.items() if name not in by_chance}
    if "choices" in kept:
        del kept["id"]
    return kept


def _key(path: str, body: dict | None) -> str:
    return json.dumps([path, body], sort_keys=True)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    play: ClassVar[Stage | Replay | Recorder]
    wbufsize = 2**16
    """Heads go out with what they head: a small packet alone waits for the client."""

    def do_GET(self) -> None:  # noqa: N802
        self._send(None)

    def do_POST(self) -> None:  # noqa: N802
        self._send(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _send(self, body: dict | None) -> None:
        found = self.play.answer(self.path, body, self.headers.get("Authorization"))
        (status, content), headers = found
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Nothing is logged."""


@contextmanager
def played(play: Stage | Replay | Recorder) -> Iterator[str]:
    """The address of a server for the time of the block, http://.../v1."""
    with serving(type("Played", (_Handler,), {"play": play})) as address:
        yield f"{address}/v1"
