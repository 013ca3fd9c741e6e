"""Tells by its files what a directory is: whose cache or checkpoint."""

import json
from pathlib import Path
from typing import Literal

from qat.errors import HubError

Kind = Literal["cache", "checkpoint"]
Format = Literal["qat", "anemll"]
ANEMLL_CACHE = "qwen_kd_topk_cache_v1"


def format_of(directory: Path, kind: Kind) -> Format:
    """Whether `directory` is in this package's format or in the reference system's.

    Raises:
        HubError: it holds nothing that is a `kind`.
    """
    names = {path.name for path in directory.iterdir()}
    has_pickles = any(directory.rglob("*.pt"))
    if kind == "cache":
        if "manifest.json" in names:
            return "qat"
        if has_pickles and _format_in(directory / "meta.json") == ANEMLL_CACHE:
            return "anemll"
        raise HubError(_nothing(directory, f"manifest.json, or meta.json of {ANEMLL_CACHE}"))
    if has_pickles:
        return "anemll"
    if any(directory.rglob("*.safetensors")):
        return "qat"
    raise HubError(_nothing(directory, "*.safetensors or *.pt"))


def kind_of(directory: Path) -> Kind:
    """What `directory` is, by its files; a run counts as a checkpoint, for it holds some."""
    is_cache = (directory / "manifest.json").is_file() or _format_in(directory / "meta.json")
    return "cache" if is_cache else "checkpoint"


def _format_in(path: Path) -> object:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return values.get("format") if isinstance(values, dict) else None


def _nothing(directory: Path, expected: str) -> str:
    return f"{directory.name} holds no {expected}; check what was packed, or the entry's kind"
