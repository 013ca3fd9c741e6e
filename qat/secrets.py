"""What must not be written down: tokens, keys, and the passwords inside addresses."""

import logging
import os
import re

HIDDEN = "[hidden]"
SHORTEST = 8
"""A value of an environment variable with fewer characters is no secret worth the name."""
NAME = re.compile(r"(TOKEN|API_KEY|ACCESS_KEY|ACCESS_KEY_ID|SECRET|PASSWORD)$")
"""Environment variables whose values are secrets."""
PATTERNS = (
    re.compile(r"(?i)(?<=://)[^/\s@'\"]+(?=@)"),  # user:password@
    re.compile(r"(?i)(?<=bearer )[\w.~+/=-]+"),
    re.compile(
        r"(?i)((?:api[_-]?key|access[_-]?key|token|secret|password|signature|credential|sig)"
        r"['\"]?\s*[=:]\s*['\"]?)(?!\[hidden)[\w.~+/%-]{8,}"
    ),
    re.compile(r"\b(?:hf|ghp|gho|ghs|glpat|github_pat|sk|pk|xox[abp])[_-][\w-]{16,}"),
    re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}"),
)


def scrubbed(text: str) -> str:
    """`text` with every secret in it replaced by `[hidden]`.

    Secrets are the values of environment variables that are named like one (HF_TOKEN,
    WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, ...), and what looks like one: tokens of the usual hubs,
    bearer tokens, `token=...` and signatures in an address, `user:password@` before a host.
    """
    for value in _known():
        text = text.replace(value, HIDDEN)
    for pattern in PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}" if pattern.groups else HIDDEN, text)
    return text


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


def _known() -> list[str]:
    """The secrets of this process's environment, longest first: one may be part of another."""
    environment = os.environ.items()  # noqa: TID251 - what is never to be written down
    values = {value for name, value in environment if NAME.search(name.upper())}
    return sorted((value for value in values if len(value) >= SHORTEST), key=len, reverse=True)
