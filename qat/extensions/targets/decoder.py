"""The order of a decoder's parts, whatever program they are written for."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from transformers import PreTrainedModel

TABLE = "model.embed_tokens"
Value = TypeVar("Value")
"""The outputs of one step of a program."""


class Decoder(ABC, Generic[Value]):
    """The parts of a llama, qwen2 or qwen3 model as steps of a program."""

    def blocks(self, x: Value, count: int) -> Value:
        """Add `count` layers and the last norm; return its output."""
        for number in range(count):
            layer = f"model.layers.{number}"
            read = self.norm(x, f"{layer}.input_layernorm")
            x = self.add(x, self.attention(read, number))
            read = self.norm(x, f"{layer}.post_attention_layernorm")
            gate, up = (self.linear(read, f"{layer}.mlp.{name}_proj") for name in ("gate", "up"))
            inner = self.multiply(self.multiply(gate, self.sigmoid(gate)), up)
            x = self.add(x, self.linear(inner, f"{layer}.mlp.down_proj"))
        return self.norm(x, "model.norm")

    @abstractmethod
    def add(self, x: Value, y: Value) -> Value:
        """Return `x + y`."""

    @abstractmethod
    def multiply(self, x: Value, y: Value) -> Value:
        """Return `x * y`."""

    @abstractmethod
    def sigmoid(self, x: Value) -> Value:
        """Return `1 / (1 + exp(-x))`."""

    @abstractmethod
    def norm(self, x: Value, name: str) -> Value:
        """Add the norm called `name` of the last dimension; return its output."""

    @abstractmethod
    def linear(self, x: Value, name: str) -> Value:
        """Add the product of the linear or head called `name`; return its output."""

    @abstractmethod
    def attention(self, x: Value, number: int) -> Value:
        """Add the attention of a layer, with its linears; return its output."""


def owner(model: PreTrainedModel, name: str) -> str:
    """Return the name of the module that stores the weight of the linear or head called `name`."""
    return TABLE if name == "lm_head" and model.config.tie_word_embeddings else name
