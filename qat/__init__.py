"""Quantization-aware distillation of causal language models.

`quantize`, `load`, `save`, `distill` and `losses.register` are documented in docs/python.md. They,
and what extensions add, are imported on first use: `import qat` imports neither torch nor
transformers. It lets `transformers.AutoModelForCausalLM.from_pretrained` load packed checkpoints.
"""

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

from qat.errors import VERSION

if TYPE_CHECKING:
    from qat import losses
    from qat.python import distill, load, quantize, save

__all__ = ["distill", "load", "losses", "quantize", "save"]
__version__ = VERSION
REGISTRY, OURS = "transformers.quantizers.auto", "qat.models.hf_quantizer"
"""The module of transformers that registers quantization methods, and ours that registers `qat`."""


class _JoinRegistry:
    """Import hook that imports `OURS` right after `REGISTRY`, if and when that is imported.

    transformers takes seconds to import. wrapt's hook does the same, but it imports asyncio and
    ssl, which took a sixth of the time of `qat --help`.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of `REGISTRY` with an import of `OURS` at its end; else None."""
        if name != REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            importlib.import_module(OURS)

        spec.loader.exec_module = exec_module
        return spec


if REGISTRY in sys.modules:
    importlib.import_module(OURS)
else:
    sys.meta_path.insert(0, _JoinRegistry())


def __getattr__(name: str) -> object:
    if name == "losses":
        return importlib.import_module("qat.losses")
    if name in __all__:
        return getattr(importlib.import_module("qat.python"), name)
    offered = importlib.import_module("qat.hooks").hooks("qat.python")
    if name in offered:
        return offered[name].load()
    raise AttributeError(f"module 'qat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
