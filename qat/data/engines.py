"""How engines that serve a model are asked for the log-probabilities of a text's tokens.

`Line` carries many requests at once to one server and repeats what it was too busy for. Below it
stand the engines: each turns token ids into requests and answers into `Word`s.

Shapes: T positions of a document that are answered.
"""

import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Annotated, NamedTuple, NotRequired, Protocol, TypeVar
from urllib.parse import urlsplit
from weakref import WeakSet

import httpx2
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from qat.errors import CacheError, ConfigError
from qat.secrets import HIDDEN, scrubbed, secret

logger = logging.getLogger(__name__)

T = TypeVar("T")
KEY = "QAT_TEACHER_API_KEY"
"""Environment variable with the key that a server asks for; not OPENAI_API_KEY, which would then go
to whatever server is named."""
HERE = ("localhost", "127.0.0.1", "::1")
CONNECT_S, ANSWER_S = 20.0, 600.0
"""Without a connection, or without a byte of an answer, before a request counts as failed."""
WHOLE_S = 3 * ANSWER_S
"""From a request to the end of its answer: a server that sends a byte now and then is left."""
ATTEMPTS, FIRST_ATTEMPTS = 10, 3
"""Of one request that fails because the server is busy, restarts or is gone: some four minutes; and
before anything is built, when it is sooner a mistake."""
PAUSE_S, LONGEST_S = 1.0, 60.0
"""After the first failure, doubled after each further one; and the longest one."""
BUSY = (408, 425, 429, 500, 502, 503, 504)
WORDS = 300
"""Characters of a server's own words that a message repeats."""
ENTRY_BYTES, ANSWER_BYTES = 400, 2**20
"""More than an engine says of one token, and around them all."""


class Refused(Exception):  # noqa: N818 - an answer; whoever asked knows what it means to the user
    """A server refuses a request as such, so that repeating it is of no use."""


class NoRoute(Refused):
    """A server has nothing at `url`."""

    def __init__(self, told: str, url: str) -> None:
        super().__init__(told)
        self.url = url


class _Broken(Exception):  # noqa: N818 - no error: another attempt follows
    """An answer that may be another one next time, after the seconds that the server names."""

    def __init__(self, reason: str, wait_s: float | None = None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Line:
    """Requests to one server, several at once; while it is busy, all of them wait.

    No answer leads elsewhere: a server that redirects is refused, so that nobody else is told the
    key or the text.

    Raises:
        ConfigError: the key of the environment is none.
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
        self.shows_key = bool(key) and where.scheme == "http" and where.hostname not in HERE
        """Whether others on the way can read the key."""
        self._key = key
        self._attempts = attempts
        self.address = address
        self._client = httpx2.Client(
            headers=headers,
            timeout=httpx2.Timeout(ANSWER_S, connect=CONNECT_S, pool=None),
            limits=httpx2.Limits(max_connections=at_once, max_keepalive_connections=at_once),
        )
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._lock = threading.Lock()
        self._not_before = 0.0
        self._over = threading.Event()

    def break_off(self) -> None:
        """End what is under way, also in other threads, and begin nothing more."""
        self._over.set()
        with self._lock:
            sockets = [*self._sockets]
        _shut(sockets)

    @contextmanager
    def _within(self, url: str) -> Iterator[None]:
        """A block in which a whole answer arrives, or the connections are ended after `WHOLE_S`.

        Requests of other threads that this breaks off are repeated.

        Raises:
            CacheError: it took too long.
        """
        late = threading.Event()

        def leave() -> None:
            late.set()
            with self._lock:
                sockets = [*self._sockets]
            _shut(sockets)

        timer = threading.Timer(WHOLE_S, leave)
        timer.daemon = True
        timer.start()
        try:
            yield
        except httpx2.TransportError:
            if not late.is_set():
                raise
        finally:
            timer.cancel()
        if late.is_set():  # an answer of no stated length ends where its connection does
            raise CacheError(
                f"{url} sent no whole answer in {WHOLE_S:g} s, expected one; check --teacher, or "
                "run the same command again: finished shards are kept"
            )

    def close(self) -> None:
        """Give the connections back, once no thread asks any more."""
        self._client.close()

    def _note(self, event: str, info: dict) -> None:
        """What the library tells of its connections: each one's socket is remembered."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._sockets.add(info["return_value"].get_extra_info("socket"))
            if self._over.is_set():
                self.break_off()

    def ask(self, path: str, body: dict | None, kind: TypeAdapter[T], most: int) -> T:
        """The answer to a POST of `body`, or to a GET without one, checked to be of `kind`.

        Args:
            path: below the address; one that begins with a slash is of the server's root.
            most: bytes that the answer may have.

        Raises:
            Refused: the server says that it does not do this.
            ConfigError: it wants a key, or leads elsewhere.
            CacheError: it is not there or too busy for too long, or its answer is of another kind.
        """
        url = f"{self.address}/{path}"
        if path.startswith("/"):
            url = f"{self.address.removesuffix('/v1')}{path}"
        content = None if body is None else json.dumps(body).encode()
        for failures in range(1, self._attempts + 1):
            self._wait_turn()
            try:
                raw = self._attempt(url, content, most)
            except (_Broken, httpx2.TransportError) as error:
                if self._over.is_set():
                    raise CacheError(f"{url}: broken off") from None
                reason = self._said(str(error) or type(error).__name__)
                pause_s = min(LONGEST_S, PAUSE_S * 2 ** (failures - 1))
                if failures < self._attempts:
                    self._hold(url, reason, getattr(error, "wait_s", None) or pause_s)
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
            self._within(url),
            self._client.stream(method, url, **how, extensions={"trace": self._note}) as answer,
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
        said = self._said(_words(bytes(raw)))
        told = f"{code} {httpx2.codes.get_reason_phrase(code)}".rstrip()
        told += f" ({said})" if said else ""
        if code in BUSY:
            wait = answer.headers.get("Retry-After", "")
            raise _Broken(
                f"the server answers {told}",
                min(LONGEST_S, float(wait)) if wait.isdecimal() else None,
            )
        if code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            found = f"refuses the key in {KEY}" if self._key else f"wants a key, and {KEY} has none"
            raise ConfigError(f"{url} {found} ({code}); put the server's key into that variable")
        if 300 <= code < 400:
            to = self._said(answer.headers.get("Location", "elsewhere"))
            raise ConfigError(f"{url} leads to {to}, which is not followed; name that as --teacher")
        if code == HTTPStatus.NOT_FOUND:
            raise NoRoute(told, url)
        raise Refused(told)

    def _said(self, words: str) -> str:
        """A server's words as one short line, without the key that it may repeat."""
        if self._key:
            words = words.replace(self._key, HIDDEN)
        return scrubbed(" ".join(words.split()))[:WORDS]

    def _wait_turn(self) -> None:
        while (left := self._not_before - time.monotonic()) > 0 and not self._over.is_set():
            self._over.wait(left)
        if self._over.is_set():
            raise CacheError(f"{self.address}: broken off")

    def _hold(self, url: str, reason: str, seconds: float) -> None:
        """Let all requests wait; who was told so meanwhile says nothing of it."""
        with self._lock:
            now = time.monotonic()
            if self._not_before <= now:
                logger.info("%s: %s; asking again in %.0f s", url, reason, seconds)
            self._not_before = max(self._not_before, now + seconds)


def _shut(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:  # to close one does not wake who reads from it
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _words(raw: bytes) -> str:
    """What an answer that is an error says, whatever the engine wraps it in."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return raw[: 4 * WORDS].decode(errors="replace")
    while isinstance(found, dict):
        found = next((found[name] for name in ("error", "message", "detail") if name in found), "")
    return str(found)


Token = Annotated[int, Field(ge=0, lt=2**31)]


class Card(TypedDict):
    """What a server says of a model that it has."""

    id: str
    owned_by: NotRequired[str | None]
    max_model_len: NotRequired[int | None]


class Cards(TypedDict):
    """What it says of all."""

    data: list[Card]


class Tokens(TypedDict):
    """What a text is to its tokenizer."""

    tokens: list[Token]


class Word(NamedTuple):
    """What a teacher says at one position of a document."""

    likeliest: dict[int, float]
    """Log-probs of the likeliest tokens by id, in nats, with that of the next token if it is known;
    normalised over the vocabulary."""
    next_logprob: float
    """Of the token that follows in the document; NaN where nobody says it."""


CARDS, TOKENS = TypeAdapter(Cards), TypeAdapter(Tokens)


class Engine(Protocol):
    """A kind of server."""

    name: str
    remedy: str
    """What makes it give `k` tokens at a position, with `{k}` in it."""

    def prepare(self, line: Line, at_once: int) -> tuple[int, int | None]:
        """How many requests it takes at once, and how long a text; None where `CARDS` says it."""

    def tokenized(self, line: Line, model: str, text: str) -> list[int]:
        """The ids of a text, with special tokens in it and none added."""

    def ask(
        self, line: Line, model: str, documents: Sequence[Sequence[int]], k: int
    ) -> list[list[Word]]:
        """The words at all positions of each document but its last one."""


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


class Vllm:
    """vLLM, and what else knows `prompt_logprobs` of its /v1/completions."""

    name = "vLLM"
    remedy = "start vLLM with --max-logprobs {k}"
    _answer = TypeAdapter(_VllmAnswer)
    _plainly = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "add_special_tokens": False}
    """One token is generated, as fewer cannot be; no setting of the model's own changes a
    log-prob."""

    def prepare(self, line: Line, at_once: int) -> tuple[int, int | None]:
        """As many as are wished: it has a queue."""
        return at_once, None

    def tokenized(self, line: Line, model: str, text: str) -> list[int]:
        """By the prompt that it says it was given."""
        body = {"model": model, "prompt": text, "return_token_ids": True, **self._plainly}
        choices = line.ask("completions", body, self._answer, ANSWER_BYTES)["choices"]
        ids = choices[0].get("prompt_token_ids") if choices else None
        if ids is None:
            raise Refused("no prompt_token_ids in the answer")
        return ids

    def ask(
        self, line: Line, model: str, documents: Sequence[Sequence[int]], k: int
    ) -> list[list[Word]]:
        """One request; the entry of a position holds the token that stands there too."""
        body = {"model": model, "prompt": documents, "prompt_logprobs": k, **self._plainly}
        answer = line.ask("completions", body, self._answer, _most_bytes(documents, k))
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        found = []
        for choice, document in zip(choices, documents, strict=False):
            said = (choice.get("prompt_logprobs") or [])[1:]
            words = [{i: entry["logprob"] for i, entry in (each or {}).items()} for each in said]
            following = document[1:]
            found.append(
                [
                    Word(word, word.get(token, float("nan")))
                    for word, token in zip(words, following, strict=False)
                ]
            )
        return found


_SglangTop = tuple[float | None, Token, object]


class _SglangMeta(TypedDict):
    input_token_logprobs: NotRequired[list[_SglangTop] | None]
    input_top_logprobs: NotRequired[list[list[_SglangTop] | None] | None]


class _SglangAnswer(TypedDict):
    meta_info: _SglangMeta


class Sglang:
    """SGLang, by its own /generate: its /v1/completions names tokens by their text."""

    name = "SGLang"
    remedy = "ask whoever runs it for more"
    _answer = TypeAdapter(list[_SglangAnswer])

    def prepare(self, line: Line, at_once: int) -> tuple[int, int | None]:
        """As many as are wished: it has a queue."""
        return at_once, None

    def tokenized(self, line: Line, model: str, text: str) -> list[int]:
        """By its /tokenize."""
        body = {"model": model, "prompt": text, "add_special_tokens": False}
        return line.ask("/tokenize", body, TOKENS, ANSWER_BYTES)["tokens"]

    def ask(
        self,
        line: Line,
        model: str,
        documents: Sequence[Sequence[int]],
        k: int,
    ) -> list[list[Word]]:
        """One request; the token that stands at a position is told apart from the likeliest."""
        body = {
            "input_ids": documents,
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": k,
            "return_text_in_logprobs": False,
        }
        found = []
        for answer in line.ask("/generate", body, self._answer, _most_bytes(documents, k)):
            meta = answer["meta_info"]
            said = (meta.get("input_top_logprobs") or [])[1:]
            own = (meta.get("input_token_logprobs") or [])[1:]
            found.append(
                [
                    Word(
                        {token: logprob for logprob, token, _ in top or () if logprob is not None},
                        float("nan") if following is None else following,
                    )
                    for top, (following, _, _) in zip(said, own, strict=False)
                ]
            )
        return found


class _LlamaTop(TypedDict):
    id: Token
    logprob: float


class _LlamaWord(TypedDict):
    top_logprobs: list[_LlamaTop]


class _LlamaAnswer(TypedDict):
    completion_probabilities: NotRequired[list[_LlamaWord] | None]


class _LlamaProps(TypedDict):
    total_slots: int
    default_generation_settings: dict[str, object]


class LlamaCpp:
    """llama.cpp's llama-server, which gives no log-probs of a prompt but those of the next token.

    So a document is asked about token by token, each time one longer, in a slot of the server that
    keeps what it has read: as fast as it would write the document.
    """

    name = "llama.cpp"
    remedy = "ask whoever runs it for more"
    _answer, _props = TypeAdapter(_LlamaAnswer), TypeAdapter(_LlamaProps)

    def __init__(self) -> None:
        self._slots: list[int] = []
        self._lock = threading.Lock()

    def prepare(self, line: Line, at_once: int) -> tuple[int, int | None]:
        """One request for each of its slots."""
        props = line.ask("/props", None, self._props, ANSWER_BYTES)
        self._slots = [*range(min(at_once, max(1, props["total_slots"])))]
        room = props["default_generation_settings"].get("n_ctx")
        return len(self._slots), room if isinstance(room, int) else None

    def tokenized(self, line: Line, model: str, text: str) -> list[int]:
        """By its /tokenize."""
        body = {"content": text, "add_special": False, "parse_special": True}
        return line.ask("/tokenize", body, TOKENS, ANSWER_BYTES)["tokens"]

    def ask(
        self,
        line: Line,
        model: str,
        documents: Sequence[Sequence[int]],
        k: int,
    ) -> list[list[Word]]:
        """A request for each position; the next token may be none of its likeliest."""
        with self._lock:
            slot = self._slots.pop()
        try:
            return [self._walk(line, document, k, slot) for document in documents]
        finally:
            with self._lock:
                self._slots.append(slot)

    def _walk(self, line: Line, document: Sequence[int], k: int, slot: int) -> list[Word]:
        words = []
        for end in range(1, len(document)):
            body = {
                "prompt": document[:end],
                "n_predict": 1,
                "n_probs": k,
                "cache_prompt": True,
                "id_slot": slot,
                "response_fields": ["completion_probabilities"],
            }
            said = line.ask("/completion", body, self._answer, _most_bytes([[0]], k))
            top = (said.get("completion_probabilities") or [{"top_logprobs": []}])[0]
            likeliest = {each["id"]: each["logprob"] for each in top["top_logprobs"]}
            words.append(Word(likeliest, likeliest.get(document[end], float("nan"))))
        return words


ENGINES: dict[str, Callable[[], Engine]] = {
    "vllm": Vllm,
    "sglang": Sglang,
    "llamacpp": LlamaCpp,
}
"""By what a server calls itself in the list of its models; others are asked as vLLM is."""
