"""Removal of secrets from text: tokens, keys, and the passwords inside addresses."""

import base64
import binascii
import logging
import os
import re
from typing import TypeVar

T = TypeVar("T")
HIDDEN = "[hidden]"
"""The replacement of a secret."""
SHORTEST = 8
"""Values of environment variables with fewer characters are not treated as secrets."""
NAME = re.compile(r"(TOKEN|KEY|KEY_ID|SECRET|PASSWORD|PASSWD|_PAT)$")
"""Names of environment variables whose values are secrets."""
PATTERNS = (
    re.compile(r"(?<=://)[^/?#\s'\"]+(?=@)"),  # user:password@, where the password may hold an @
    # or unescaped characters in it; but host:8080/x@y has a port
    re.compile(r"(?<=://)[^/?#\s:@\['\"]+:(?![0-9]{1,5}[/?#])[^\s'\"]+(?=@)"),
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]+"),
    re.compile(r"(?i)(authorization['\"]?\s*[=:]\s*['\"]?\w+ )(?!\[hidden)[^\s'\",;]+"),
    re.compile(
        r"(?i)((?:api[_-]?key|access[_-]?key|private[_-]?key|(?<!per_)token|secret|passwo?r?d|passwd"
        r"|pwd|signature|credential|sig|(?-i:[A-Z0-9]_(?:KEY|KEY_ID|PAT)))['\"]?\s*[=:]\s*['\"]?)"
        r"(?!\[hidden)[^\s'\"&,;(){}\[\]]{8,}"
    ),
    re.compile(  # in lower case after a colon it may be a tensor, such as pool_key: bfloat16
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
"""A user and password in base64, or just a word after `basic` in a sentence."""


def secret(name: str) -> str | None:
    """Return the value of the environment variable `name`, which must be named like a secret.

    None if it is unset or empty.
    """
    assert NAME.search(name), name
    return os.environ.get(name) or None  # noqa: TID251 - keys are never stored in files or settings


def scrubbed(text: str) -> str:
    """Return `text` with every secret in it replaced by `[hidden]`.

    Secrets are the values of environment variables that are named like one (HF_TOKEN,
    WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, ...), and text that looks like one: tokens of the usual
    hubs, keys of AWS and Google, the content of an `Authorization` header, `token=...`,
    `STRIPE_KEY=...` and signatures in an address, `--api-key ...`, `user:password@` before a host.
    """
    for value in _known():
        text = text.replace(value, HIDDEN)
    for pattern in PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}" if pattern.groups else HIDDEN, text)
    return BASIC.sub(lambda f: f"{f[1]}{HIDDEN}" if _is_credentials(f[2]) else f[0], text)


def scrubbed_in(value: T) -> T:
    """Return the same table, list or value with every text in it `scrubbed`."""
    if isinstance(value, str):
        return scrubbed(value)
    if isinstance(value, dict):
        return {key: scrubbed_in(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [*map(scrubbed_in, value)]
    return value


class Scrub(logging.Filter):
    """Log filter that removes secrets from the message and traceback of every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Scrub message and traceback; every record passes."""
        record.msg, record.args = scrubbed(record.getMessage()), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = scrubbed(record.exc_text)
        return True


SCRUB = Scrub()
"""One for all handlers: adding it again changes nothing."""


def _is_credentials(word: str) -> bool:
    """Return whether a word is base64 of `user:password`, or has other characters than letters.

    Words of a sentence have letters only.
    """
    if not word.isalpha():
        return True
    try:
        text = base64.b64decode(word + "=" * (-len(word) % 4)).decode()
    except (binascii.Error, UnicodeDecodeError):
        return False
    return ":" in text and text.isprintable()


def _known() -> list[str]:
    """Return the secrets of this process's environment, longest first: one may contain another."""
    environment = os.environ.items()  # noqa: TID251 - values that must not be written
    values = {value for name, value in environment if NAME.search(name.upper())}
    return sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True)
