"""Request the log-probabilities of a text's tokens from inference servers.

`Client` sends many requests in parallel to one server and retries while the server is busy. Each
engine class translates token ids into requests, and responses into `Position`s.

Shapes: T positions of a document that are answered.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, NamedTuple, NotRequired, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx2
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from qat.errors import CacheError, ConfigError
from qat.hub.web import RETRYABLE, Connections, check_busy, pause_s, status_of
from qat.secrets import HIDDEN, scrubbed, secret

logger = logging.getLogger(__name__)

T = TypeVar("T")
KEY = "QAT_TEACHER_API_KEY"
"""Environment variable with the server's API key. Not OPENAI_API_KEY, which would then be sent to
any server that is named."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # hosts to which the key may go unencrypted
CONNECT_S, ANSWER_S = 20.0, 600.0
"""Connect timeout, and the longest time without a byte of a response, in seconds."""
RESPONSE_S = 3 * ANSWER_S
"""Timeout of a whole response, in seconds: stops a server that only sends a byte now and then."""
ATTEMPTS, FIRST_ATTEMPTS = 10, 3
"""Attempts per request: `ATTEMPTS` during a build (about four minutes, enough for a restart of the
server), `FIRST_ATTEMPTS` before it, where a failure is more likely a wrong address."""
MESSAGE_CHARACTERS = 300
"""Maximum number of characters of a server's message that an error repeats."""
ENTRY_BYTES, ANSWER_BYTES = 400, 2**20
"""Upper bounds in bytes: what an engine sends per token, and the rest of a response."""


class Refused(Exception):  # noqa: N818 - caught by callers, which raise the user's error
    """The server rejects a request permanently, so a retry is useless."""


class NoRoute(Refused):
    """The server has no route at `url` (HTTP 404)."""

    def __init__(self, message: str, url: str) -> None:
        super().__init__(message)
        self.url = url


class Client:
    """An HTTP client for one server with parallel requests; all of them pause while it is busy.

    Redirects are refused, so that no other host receives the key or the text.

    Raises:
        ConfigError: the key in the environment holds characters that no header can carry.
    """

    def __init__(self, address: str, at_once: int = 1, *, attempts: int = FIRST_ATTEMPTS) -> None:
        key = (secret(KEY) or "").strip()
        if not (key.isascii() and key.isprintable()):
            raise ConfigError(
                f"{KEY} holds characters that no request can carry, expected the server's key "
                "alone; set it anew"
            )
        headers = {"User-Agent": "qat", "Accept-Encoding": "identity"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        where = urlsplit(address)
        self.shows_key = bool(key) and where.scheme == "http" and where.hostname not in LOOPBACK
        """True if the key travels unencrypted to another host."""
        self._key = key
        self._attempts = attempts
        self.address = address
        self._client = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=at_once, max_keepalive_connections=at_once),
        )
        self._connections = Connections()
        self._lock = threading.Lock()
        self._not_before = 0.0
        self._is_aborted = threading.Event()

    def abort(self) -> None:
        """Abort all requests in flight, also in other threads, and start no more."""
        self._is_aborted.set()
        self._connections.end()

    @contextmanager
    def _deadline(self, url: str) -> Iterator[None]:
        """Shut the connections down if the whole response takes longer than `RESPONSE_S`.

        Requests of other threads that are aborted by this are retried.

        Raises:
            CacheError: the response took too long.
        """
        late = threading.Event()

        def abort() -> None:
            late.set()
            self._connections.shut()

        timer = threading.Timer(RESPONSE_S, abort)
        timer.daemon = True
        timer.start()
        try:
            yield
        except httpx2.TransportError:
            if not late.is_set():
                raise
        finally:
            timer.cancel()
        if late.is_set():  # no error without Content-Length, as it ends with the connection
            raise CacheError(
                f"{url} sent no whole answer in {RESPONSE_S:g} s, expected one; check --teacher, "
                "or run the same command again: finished shards are kept"
            )

    def close(self) -> None:
        """Close the connections; call it when no thread sends requests any more."""
        self._client.close()

    def ask(self, path: str, body: dict | None, kind: TypeAdapter[T], most: int) -> T:
        """Send `body` by POST, or a GET without one, and return the response validated as `kind`.

        Retries with exponential backoff while the server is busy or unreachable.

        Args:
            path: path below the address; a leading slash means the server's root.
            most: maximum size of the response in bytes.

        Raises:
            Refused: the server rejects the request.
            ConfigError: the server requires a key, or redirects.
            CacheError: the server is unreachable or busy for too long, or its response has another
                format.
        """
        url = f"{self.address}/{path}"
        if path.startswith("/"):
            url = f"{self.address.removesuffix('/v1')}{path}"
        content = None if body is None else json.dumps(body).encode()
        for failures in range(1, self._attempts + 1):
            self._wait_while_paused()
            try:
                raw = self._attempt(url, content, most)
            except RETRYABLE as error:
                if self._is_aborted.is_set():
                    raise CacheError(f"{url}: broken off") from None
                reason = self._one_line(str(error) or type(error).__name__)
                if failures < self._attempts:
                    self._pause(url, reason, getattr(error, "wait_s", None) or pause_s(failures))
                continue
            try:
                return kind.validate_json(raw)
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"])) or "the answer"
                raise CacheError(
                    f"{url} answers what no engine known here does ({where}: {first['msg']}), "
                    "expected vLLM, SGLang or llama.cpp; check the address"
                ) from None
        raise CacheError(
            f"{url}: {reason}, {self._attempts} times, expected an answer; check --teacher, or run "
            "the same command again when the server answers: finished shards are kept"
        )

    def _attempt(self, url: str, content: bytes | None, most: int) -> bytes:
        how = {"content": content, "headers": {"Content-Type": "application/json"}}
        method, how = ("GET", {}) if content is None else ("POST", how)
        with (
            self._deadline(url),
            self._client.stream(
                method, url, **how, extensions={"trace": self._connections.note}
            ) as answer,
        ):
            raw = bytearray()
            for piece in answer.iter_raw():
                raw += piece
                if len(raw) > most:
                    raise CacheError(
                        f"{url} sends more than {most:,} bytes, expected fewer; check that it is "
                        "vLLM, SGLang or llama.cpp"
                    )
        code = answer.status_code
        if code == HTTPStatus.OK:
            return bytes(raw)
        detail = self._one_line(_error_message(bytes(raw)))
        message = f"{status_of(answer)} ({detail})" if detail else status_of(answer)
        check_busy(answer, f"the server answers {message}")
        if code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            found = f"refuses the key in {KEY}" if self._key else f"wants a key, and {KEY} has none"
            raise ConfigError(f"{url} {found} ({code}); put the server's key into that variable")
        if 300 <= code < 400:
            to = self._one_line(answer.headers.get("Location", "elsewhere"))
            raise ConfigError(f"{url} leads to {to}, which is not followed; name that as --teacher")
        if code == HTTPStatus.NOT_FOUND:
            raise NoRoute(message, url)
        raise Refused(message)

    def _one_line(self, text: str) -> str:
        """Return a server's message as one short line, without the key, which it may repeat."""
        if self._key:
            text = text.replace(self._key, HIDDEN)
        return scrubbed(" ".join(text.split()))[:MESSAGE_CHARACTERS]

    def _wait_while_paused(self) -> None:
        while (left := self._not_before - time.monotonic()) > 0 and not self._is_aborted.is_set():
            self._is_aborted.wait(left)
        if self._is_aborted.is_set():
            raise CacheError(f"{self.address}: broken off")

    def _pause(self, url: str, reason: str, seconds: float) -> None:
        """Pause all requests; log the pause once."""
        with self._lock:
            now = time.monotonic()
            if self._not_before <= now:
                logger.info("%s: %s; asking again in %.0f s", url, reason, seconds)
            self._not_before = max(self._not_before, now + seconds)


def _error_message(raw: bytes) -> str:
    """Extract the message of an error response; engines wrap it in different JSON."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return raw[: 4 * MESSAGE_CHARACTERS].decode(errors="replace")
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if name in found), "")
    return str(found)


Token = Annotated[int, Field(ge=0, lt=2**31)]


class ModelCard(TypedDict):
    """One entry of a server's list of models."""

    id: str
    owned_by: NotRequired[str | None]
    max_model_len: NotRequired[int | None]


class ModelList(TypedDict):
    """A server's list of models."""

    data: list[ModelCard]


class Tokens(TypedDict):
    """The token ids of a text."""

    tokens: list[Token]


class Position(NamedTuple):
    """The teacher's log-probabilities at one position of a document."""

    top: dict[int, float]
    """Log-probs of the most likely tokens by id, in nats, normalised over the vocabulary; the next
    token is included if the server returns it."""
    next_logprob: float
    """Log-prob of the next token in the document, in nats; NaN if the server does not return it."""


MODELS, TOKENS = TypeAdapter(ModelList), TypeAdapter(Tokens)


class Engine(Protocol):
    """The protocol of one kind of server."""

    name: str
    remedy = "ask whoever runs it for more"
    """Advice for the user whose server returns fewer than `k` tokens per position; may contain
    `{k}`."""

    def prepare(self, client: Client, at_once: int) -> tuple[int, int | None]:
        """Return how many requests may be in flight, and the context length or None.

        None means that the server's list of models states it. By default the server queues
        requests, so that `at_once` may be.
        """
        return at_once, None

    def tokenized(self, client: Client, model: str, text: str) -> list[int]:
        """Return the ids of a text; special tokens in it are recognised and none are added."""

    def ask(
        self, client: Client, model: str, documents: Sequence[Sequence[int]], k: int
    ) -> list[list[Position]]:
        """Return the log-probs at all positions of each document except its last one."""


def _most_bytes(documents: Sequence[Sequence[int]], k: int) -> int:
    return ANSWER_BYTES + sum(map(len, documents)) * (k + 2) * ENTRY_BYTES


class _LogProb(TypedDict):
    logprob: float


class _VllmChoice(TypedDict):
    index: int
    prompt_logprobs: NotRequired[list[dict[Token, _LogProb] | None] | None]
    prompt_token_ids: NotRequired[list[int] | None]


class _VllmAnswer(TypedDict):
    choices: list[_VllmChoice]


class Vllm(Engine):
    """vLLM, and other servers whose /v1/completions supports `prompt_logprobs`."""

    name = "vLLM"
    remedy = "start vLLM with --max-logprobs {k}"
    _answer = TypeAdapter(_VllmAnswer)
    _plainly = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "add_special_tokens": False}
    """One token is generated, the minimum; the other fields override the model's sampling defaults,
    which would change log-probs."""

    def tokenized(self, client: Client, model: str, text: str) -> list[int]:
        """Return the prompt's ids, which the server echoes with `return_token_ids`."""
        body = {"model": model, "prompt": text, "return_token_ids": True, **self._plainly}
        choices = client.ask("completions", body, self._answer, ANSWER_BYTES)["choices"]
        ids = choices[0].get("prompt_token_ids") if choices else None
        if ids is None:
            raise Refused("no prompt_token_ids in the answer")
        return ids

    def ask(
        self, client: Client, model: str, documents: Sequence[Sequence[int]], k: int
    ) -> list[list[Position]]:
        """Send one request for all documents; a position's entry also holds its own token."""
        body = {"model": model, "prompt": documents, "prompt_logprobs": k, **self._plainly}
        answer = client.ask("completions", body, self._answer, _most_bytes(documents, k))
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        found = []
        for choice, document in zip(choices, documents, strict=False):
            entries = (choice.get("prompt_logprobs") or [])[1:]
            tops = [{i: entry["logprob"] for i, entry in (each or {}).items()} for each in entries]
            following = document[1:]
            found.append(
                [
                    Position(top, top.get(token, float("nan")))
                    for top, token in zip(tops, following, strict=False)
                ]
            )
        return found


_SglangTop = tuple[float | None, Token, object]


class _SglangMeta(TypedDict):
    input_token_logprobs: NotRequired[list[_SglangTop] | None]
    input_top_logprobs: NotRequired[list[list[_SglangTop] | None] | None]


class _SglangAnswer(TypedDict):
    meta_info: _SglangMeta


class Sglang(Engine):
    """SGLang, through its own /generate: its /v1/completions names tokens by their text."""

    name = "SGLang"
    _answer = TypeAdapter(list[_SglangAnswer])

    def tokenized(self, client: Client, model: str, text: str) -> list[int]:
        """Return the ids from SGLang's /tokenize."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return client.ask("/tokenize", body, TOKENS, ANSWER_BYTES)["tokens"]

    def ask(
        self,
        client: Client,
        model: str,
        documents: Sequence[Sequence[int]],
        k: int,
    ) -> list[list[Position]]:
        """Send one request for all documents; next tokens' log-probs come in a separate list."""
        body = {
            "input_ids": documents,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
            "return_text_in_logprobs": False,
        }
        found = []
        for answer in client.ask("/generate", body, self._answer, _most_bytes(documents, k)):
            meta = answer["meta_info"]
            tops = (meta.get("input_top_logprobs") or [])[1:]
            own = (meta.get("input_token_logprobs") or [])[1:]
            found.append(
                [
                    Position(
                        {token: logprob for logprob, token, _ in top or () if logprob is not None},
                        float("nan") if following is None else following,
                    )
                    for top, (following, _, _) in zip(tops, own, strict=False)
                ]
            )
        return found


class _LlamaTop(TypedDict):
    id: Token
    logprob: float


class _LlamaPosition(TypedDict):
    top_logprobs: list[_LlamaTop]


class _LlamaAnswer(TypedDict):
    completion_probabilities: NotRequired[list[_LlamaPosition] | None]


class _LlamaProps(TypedDict):
    total_slots: int
    default_generation_settings: dict[str, object]


class LlamaCpp(Engine):
    """llama.cpp's llama-server, which returns log-probs of the next token but not of a prompt.

    A document is therefore requested token by token, each prompt one token longer, in a slot of the
    server that keeps its KV cache: as fast as the server would generate the document.
    """

    name = "llama.cpp"
    _answer, _props = TypeAdapter(_LlamaAnswer), TypeAdapter(_LlamaProps)

    def __init__(self) -> None:
        self._slots: list[int] = []
        self._lock = threading.Lock()

    def prepare(self, client: Client, at_once: int) -> tuple[int, int | None]:
        """Return one parallel request per slot, and the context length of a slot."""
        props = client.ask("/props", None, self._props, ANSWER_BYTES)
        self._slots = [*range(min(at_once, max(1, props["total_slots"])))]
        room = props["default_generation_settings"].get("n_ctx")
        return len(self._slots), room if isinstance(room, int) else None

    def tokenized(self, client: Client, model: str, text: str) -> list[int]:
        """Return the ids from llama-server's /tokenize."""
        body = {"content": text, "add_special": False, "parse_special": True}
        return client.ask("/tokenize", body, TOKENS, ANSWER_BYTES)["tokens"]

    def ask(
        self,
        client: Client,
        model: str,
        documents: Sequence[Sequence[int]],
        k: int,
    ) -> list[list[Position]]:
        """Send one request per position; a next token outside the top `k` has log-prob NaN."""
        with self._lock:
            slot = self._slots.pop()
        try:
            return [self._ask_each_position(client, document, k, slot) for document in documents]
        finally:
            with self._lock:
                self._slots.append(slot)

    def _ask_each_position(
        self, client: Client, document: Sequence[int], k: int, slot: int
    ) -> list[Position]:
        found = []
        for end in range(1, len(document)):
            body = {
                "prompt": document[:end],
                "n_predict": 1,
                "n_probs": k,
                "cache_prompt": True,
                "id_slot": slot,
                "response_fields": ["completion_probabilities"],
            }
            answer = client.ask("/completion", body, self._answer, _most_bytes([[0]], k))
            first = (answer.get("completion_probabilities") or [{"top_logprobs": []}])[0]
            top = {each["id"]: each["logprob"] for each in first["top_logprobs"]}
            found.append(Position(top, top.get(document[end], float("nan"))))
        return found


ENGINES: dict[str, Callable[[], Engine]] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "llamacpp": LlamaCpp,
}
"""Engine class by the `owned_by` field of the server's list of models; the default is `Vllm`."""
