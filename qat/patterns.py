"""Regular expressions that came with a model, tested in a process that can be stopped."""

import json
import subprocess
import sys
from collections.abc import Iterable

TRY_S = 5.0
"""Timeout for all patterns together, in seconds."""
MOST_PATTERNS, LONGEST_PATTERN = 10_000, 10_000
"""Limits on the number of patterns and on the characters of one."""
CHILD = """
import json, re, sys
patterns, names = json.load(sys.stdin)
for pattern in patterns:
    tried = re.compile(pattern), re.compile(rf"(?:.*\\.)?(?:{pattern})$")
    for name in names:
        for each in tried:
            each.match(name), each.fullmatch(name), each.search(name)
"""
"""All ways in which compressed-tensors and peft match a pattern with the name of a module."""


def pattern_fault(patterns: Iterable[str], names: Iterable[str]) -> str | None:
    """Return a short description of what is wrong with patterns for module names, or None.

    A short pattern can take practically forever (`(a+)+$`), so another process tests them first,
    for at most `TRY_S` seconds.
    """
    patterns = list(dict.fromkeys(patterns))
    if not patterns:
        return None
    longest = max(patterns, key=len)
    if len(patterns) > MOST_PATTERNS or len(longest) > LONGEST_PATTERN:
        return f"{len(patterns)} patterns, the longest of {len(longest)} characters"
    try:
        tried = subprocess.run(
            [sys.executable, "-I", "-S", "-c", CHILD],
            input=json.dumps([patterns, list(names)]).encode(),
            capture_output=True,
            timeout=TRY_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"patterns (such as {longest[:80]!r}) that take longer than {TRY_S:g} s to match"
    if tried.returncode != 0:
        return f"a pattern that is no regular expression (one of {longest[:80]!r} and the like)"
    return None
