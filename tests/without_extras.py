"""`python without_extras.py WORDS`: `qat WORDS` where nothing but what it depends on is installed.

Without WORDS every module is imported instead, and every verb is asked for its help.
"""

import contextlib
import importlib
import io
import pkgutil
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).parents[1] / "pyproject.toml"
ASKED_FOR_FIRST = {
    "qat.extensions.integrations.adapters",
    "qat.extensions.integrations.trl",
    "qat.extensions.lab.tpu_plan.xla",
    "qat.extensions.targets.coreml_program",
    "qat.extensions.targets.onnx_program",
    "qat.extensions.targets.openvino_program",
    "qat.extensions.vllm.plugin",
}
"""Modules that import an extra's package, which who imports them has asked for."""


def needed() -> set[str]:
    """The distributions that a plain `pip install` brings, by their canonical names."""
    found: set[str] = set()
    wanted = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["dependencies"]
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        is_for_us = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if name in found or not is_for_us:
            continue
        found.add(name)
        with contextlib.suppress(PackageNotFoundError):
            wanted += requires(name) or []
    return found


def block() -> set[str]:
    """Make every other installed package one that is not there; their names."""
    kept = needed()
    others = {
        package
        for package, brought_by in packages_distributions().items()
        if package != "qat" and not kept & {canonicalize_name(name) for name in brought_by}
    }
    sys.modules.update(dict.fromkeys(others))
    return others


def import_all() -> None:
    """Import every module of qat, and let every verb say its help."""
    import qat
    from qat.cli import app

    for module in pkgutil.walk_packages(qat.__path__, "qat."):
        if module.name not in ASKED_FOR_FIRST and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    verbs = [[verb] for verb in app if not verb.startswith("-")]
    below = [[*verb, name] for verb in verbs for name in app[verb[0]] if not name.startswith("-")]
    for words in [[], *verbs, *below]:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            app([*words, "--help"], result_action="return_value")
        assert said.getvalue().startswith(" ".join(["Usage: qat", *words])), words


if __name__ == "__main__":
    gone = block()
    if sys.argv[1:]:
        from qat.cli import main

        main()
    else:
        import_all()
        sys.stdout.write(" ".join(sorted(gone)))
