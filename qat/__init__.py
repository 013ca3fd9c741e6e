"""Quantization-aware distillation of causal language models.

Importing `qat` makes `transformers.AutoModelForCausalLM.from_pretrained` able to load packed
checkpoints. It imports neither torch nor transformers itself.
"""

import importlib

import wrapt

__version__ = "0.1.0"

# transformers is slow to import: join its registry when, and only if, it gets loaded
wrapt.register_post_import_hook(
    lambda _: importlib.import_module("qat.models.hf_quantizer"), "transformers.quantizers.auto"
)
