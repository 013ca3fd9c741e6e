"""Quantization-aware distillation of causal language models.

`quantize`, `load`, `save`, `distill` and `losses.register` are what docs/python.md tells of. They
are imported when first used: `import qat` itself imports neither torch nor transformers. It makes
`transformers.AutoModelForCausalLM.from_pretrained` able to load packed checkpoints.
"""

import importlib
from typing import TYPE_CHECKING

import wrapt

if TYPE_CHECKING:
    from qat import losses
    from qat.python import distill, load, quantize, save

__all__ = ["distill", "load", "losses", "quantize", "save"]
__version__ = "0.1.0"

# transformers is slow to import: join its registry when, and only if, it gets loaded
wrapt.register_post_import_hook(
    lambda _: importlib.import_module("qat.models.hf_quantizer"), "transformers.quantizers.auto"
)


def __getattr__(name: str) -> object:
    if name == "losses":
        return importlib.import_module("qat.losses")
    if name in __all__:
        return getattr(importlib.import_module("qat.python"), name)
    raise AttributeError(f"module 'qat' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
