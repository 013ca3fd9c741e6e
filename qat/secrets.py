"""What must not be written down: tokens, keys, and the passwords inside addresses."""

import base64
import binascii
import logging
import os
import re
from typing import TypeVar

T = TypeVar("T")
HIDDEN = "[hidden]"
SHORTEST = 8
"""A value of an environment variable with fewer characters is no secret worth the name."""
NAME = re.compile(r"(TOKEN|KEY|KEY_ID|SECRET|PASSWORD|PASSWD|_PAT)$")
"""Environment variables whose values are secrets."""
PATTERNS = (
    re.compile(r"(?<=://)[^/?#\s'\"]+(?=@)"),  # user:password@, where the password may hold an @
    # or what should have been escaped; but host:8080/x@y has a port
    re.compile(r"(?<=://)[^/?#\s:@\['\"]+:(?![0-9]{1,5}[/?#])[^\s'\"]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]+"),
    re.compile(r"(?i)(authorization['\"]?\s*[=:]\s*['\"]?\w+ )(?!\[hidden)[^\s'\",;]+"),
    re.compile(
        r"(?i)((?:api[_-]?key|access[_-]?key|private[_-]?key|(?<!per_)token|secret|passwo?r?d|passwd"
        r"|pwd|signature|credential|sig|(?-i:[A-Z0-9]_(?:KEY|KEY_ID|PAT)))['\"]?\s*[=:]\s*['\"]?)"
        r"(?!\[hidden)[^\s'\"&,;(){}\[\]]{8,}"
    ),
    re.compile(  # in small letters behind a colon it may be a tensor, such as pool_key: bfloat16
        r"(?i)([_-](?:key|pat)(?:['\"]\s*:|['\"]?\s*=)\s*['\"]?)(?!\[hidden)"
        r"[^\s'\"&,;(){}\[\]]{8,}"
    ),
    re.compile(  # a flag and its value, also as a list of words shows them
        r"(?i)(--[\w-]*(?:key|[_-]pat|token|secret|passwo?r?d|passwd|pwd)['\"]?[\s,]+['\"]?)"
        r"(?![-\[])[^\s'\",]{8,}"
    ),
    re.compile(
        r"\b(?:hf|gh[oprsu]|glpat|github_pat|dckr_pat|npm|pypi|sk|pk|xox[abeprs])[_-][\w-]{16,}"
    ),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"),
    re.compile(r"\b(?:AIza[\w-]{30,}|GOCSPX-[\w-]{16,}|ya29\.[\w-]{16,})"),  # Google's
)
BASIC = re.compile(r"(?i)(\bbasic\s+)([a-z0-9+/]{8,}={0,2})")
"""What may be a user and a password in base64, or the word behind `basic` in a sentence."""


def secret(name: str) -> str | None:
    """The value of the environment variable `name`, whose name says that it is a secret; None
    where it is not set or empty."""
    assert NAME.search(name), name
    return os.environ.get(name) or None  # noqa: TID251 - keys are in no file and no setting


def scrubbed(text: str) -> str:
    """`text` with every secret in it replaced by `[hidden]`.

    Secrets are the values of environment variables that are named like one (HF_TOKEN,
    WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, ...), and what looks like one: tokens of the usual hubs,
    keys of AWS and Google, what an `Authorization` header holds, `token=...`, `STRIPE_KEY=...` and
    signatures in an address, `--api-key ...`, `user:password@` before a host.
    """
    for value in _known():
        text = text.replace(value, HIDDEN)
    for pattern in PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}" if pattern.groups else HIDDEN, text)
    return BASIC.sub(lambda f: f"{f[1]}{HIDDEN}" if _is_credentials(f[2]) else f[0], text)


def scrubbed_in(value: T) -> T:
    """The same table, list or value, every text in it as `scrubbed` leaves it."""
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, dict):
        return {key: scrubbed_in(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [*map(scrubbed_in, value)]
    return value


class Scrub(logging.Filter):
    """Lets every log record pass, without the secrets in its message and its traceback."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replace message and traceback by what `scrubbed` leaves of them."""
        record.msg, record.args = scrubbed(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = scrubbed(record.exc_text)
        return True


def _is_credentials(word: str) -> bool:
    """Whether a word is base64: no word of a sentence has digits, or hides `user:password`."""
    if not word.isalpha():
        return True
    try:
        text = base64.b64decode(word + "=" * (-len(word) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return False
    return ":" in text and text.isprintable()


def _known() -> list[str]:
    """The secrets of this process's environment, longest first: one may be part of another."""
    environment = os.environ.items()  # noqa: TID251 - what is never to be written down
    values = {value for name, value in environment if NAME.search(name.upper())}
    return sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True)
