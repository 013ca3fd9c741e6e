"""Adapters of peft on a packed model, which an extension has; peft is imported on first use."""

from qat.hooks import extension


def __getattr__(name: str) -> object:
    if name != "prepare_lora":
        raise AttributeError(f"module 'qat.integrations.peft' has no attribute {name!r}")
    return extension("qat.python", "load_peft")().prepare_lora
