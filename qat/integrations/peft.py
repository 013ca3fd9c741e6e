"""Adapters of peft on a packed model, which an extension has."""

from qat.hooks import extension

prepare_lora = extension("qat.python", "load_peft")().prepare_lora
