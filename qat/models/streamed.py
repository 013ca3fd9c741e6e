"""Models that stay in their files: the weights of a layer are in memory only while it runs.

Weights that are not in memory are maps of files: each can be read like any tensor, in the dtype of
the file, and its pages can be reclaimed for other processes. A unit (a decoder layer, the
embedding, the head) that runs, or that `LanguageModel.present` holds, has its weights on the device
in the compute dtype; no other unit has.

The second half runs a model layer by layer, with all batches through one layer before the next.
Shapes: B sequences, S positions, D model width.
"""

import inspect
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate.hooks import remove_hook_from_module
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from qat.backend.base import GIB
from qat.backend.copies import SMALL_BYTES
from qat.backend.device import on
from qat.errors import CheckpointError
from qat.models.language_model import LanguageModel
from qat.nn.quant_linear import QuantLinear
from qat.nn.swap import CACHE, decoder_layers, tables_read

logger = logging.getLogger(__name__)

ON_DISK = {"": "disk"}
"""Device map with which transformers leaves every weight in its file. Weights that it makes of
several tensors, such as the experts of a layer, are written to new files."""
STORED = (torch.float32, torch.bfloat16)
"""Dtypes of unquantized tensors in our checkpoints."""
Tokens = tuple[Tensor, Tensor]
"""Ids and positions, `(B, S)` each."""
Slot = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters or buffers."""


def to_file(tensor: Tensor, folder: Path | None) -> Tensor:
    """Move a tensor to the host as a map of an unlinked file; small ones stay in memory.

    Raises:
        CheckpointError: the disk of `folder` (by default, that of temporary files) is full.
    """
    tensor = tensor.detach().cpu().contiguous()
    if tensor.nbytes <= SMALL_BYTES:
        return tensor
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(tensor.view(-1).view(torch.uint8).numpy())
            file.flush()
            # shared, so that it does not count as memory of this process
            size = tensor.nbytes
            there = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    except OSError as error:
        raise CheckpointError(
            f"{folder or tempfile.gettempdir()}: what does not fit in memory cannot be written "
            f"there ({error}); free some space, or choose another disk with --out or TMPDIR"
        ) from error
    return there.view(tensor.dtype).view(tensor.shape)


class StreamedModel(LanguageModel):
    """A model whose units load and unload their weights; all other weights stay in memory."""

    def __init__(
        self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, folder: Path
    ) -> None:
        """Take `model`, prepared by `map_weights`, to compute on `device` in `dtype`.

        `folder` is a directory on a disk with room for tensors that do not fit in memory.
        """
        self._device, self._dtype, self.folder = device, dtype, folder
        self._in_float32 = tuple(model._keep_in_fp32_modules_strict or ())
        super().__init__(model)
        self._loaded: dict[nn.Module, list[tuple[Slot, Tensor, Tensor]]] = {}
        tables = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
        self._units = {*decoder_layers(model), *(tables - tables_read(model))}
        inside = {module for unit in self._units for module in unit.modules()}
        self._names = {module: name for name, module in model.named_modules()}
        # weights outside of units are loaded now, to stay; tied ones are shared with the units
        stays = self._load(module for module in self._names if module not in inside)
        shared = {id(old): new for _, old, new in stays}
        for owner, name in (slot for module in inside for slot in _slots(module)):
            own = getattr(owner, name)
            setattr(owner, name, shared.get(id(own), own))
        for unit in self._units:
            unit.forward = self._loading(unit, unit.forward)

    @property
    def device(self) -> torch.device:
        """The device of the input ids."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model computes in without autocast."""
        return self._dtype

    def device_of(self, module: nn.Module) -> torch.device:  # noqa: ARG002
        """Return the compute device, also if the weights of `module` are in files now."""
        return self._device

    @contextmanager
    def present(self, module: nn.Module) -> Iterator[None]:
        """Keep the weights of a unit on the device in the block; do nothing for other modules.

        Linears that were quantized in the block are moved to files at its end.
        """
        if module not in self._units or module in self._loaded:
            yield
            return
        before = {*module.modules()}
        self._loaded[module] = self._load(before)
        try:
            yield
        finally:
            for (owner, name), old, new in self._loaded.pop(module):
                if getattr(owner, name, None) is new:
                    setattr(owner, name, old)
            for made in {*module.modules()} - before:
                self.settle(made)

    def hidden_of(self, batches: Iterable[Tokens]) -> Iterator[Tensor]:
        """Yield `hidden` of each batch, with all batches through a layer before the next one."""
        return hidden_layer_by_layer(self, [*batches])

    def settle(self, module: nn.Module) -> None:
        """Move the tensors of a quantized linear to files."""
        if isinstance(module, QuantLinear):
            for _, name in _slots(module):
                old = getattr(module, name)
                kept = to_file(old, self.folder)
                setattr(module, name, nn.Parameter(kept) if isinstance(old, nn.Parameter) else kept)

    def widen(self) -> None:
        """Convert unquantized parameters exactly to a dtype that our checkpoints have."""
        for parameter in self.model.parameters():
            if parameter.is_floating_point() and parameter.dtype not in STORED:
                parameter.data = to_file(parameter.float(), self.folder)

    def _loading(self, unit: nn.Module, forward: Callable) -> Callable:
        @wraps(forward)
        def call(*args: object, **named: object) -> object:
            with self.present(unit):
                return forward(*args, **named)

        return call

    def _load(self, modules: Iterable[nn.Module]) -> list[tuple[Slot, Tensor, Tensor]]:
        """Put the tensors of modules on the device; return slots with the old and new tensors."""
        made: dict[int, Tensor] = {}
        brought = []
        for module in modules:
            for _, name in _slots(module):
                old = getattr(module, name)
                if id(old) not in made:
                    made[id(old)] = self._on_device(f"{self._names.get(module, '')}.{name}", old)
                new = made[id(old)]
                if new is not old:
                    setattr(module, name, new)
                    brought.append(((module, name), old, new))
        return brought

    def _on_device(self, name: str, tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            is_wide = any(part in name for part in self._in_float32)
            dtype = torch.float32 if is_wide else self._dtype
        # cast after the copy: fewer bytes to transfer
        there = tensor.data.to(self._device).to(dtype)
        if there.data_ptr() == tensor.data_ptr():
            return tensor
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(there, requires_grad=False) if is_parameter else there


def map_weights(model: PreTrainedModel) -> None:
    """Replace the parameters of a model that was loaded `ON_DISK` by maps of its files.

    Raises:
        CheckpointError: a weight has another shape than the configuration implies.
    """
    opened: dict[tuple[str, str], nn.Parameter] = {}
    for name, (file, key) in _taken_off(model).items():
        if (file, key) not in opened:  # tied weights stay tied
            with safe_open(file, framework="pt") as tensors:
                opened[file, key] = nn.Parameter(tensors.get_tensor(key), requires_grad=False)
        owner, _, own = name.rpartition(".")
        module, found = model.get_submodule(owner), opened[file, key]
        wished = getattr(module, own).shape
        if found.shape != wished:
            raise CheckpointError(
                f"{model.name_or_path} holds a {name} of shape {tuple(found.shape)}, expected "
                f"{tuple(wished)}; copy or download it anew"
            )
        setattr(module, own, found)


def _slots(module: nn.Module) -> list[Slot]:
    kinds = module.named_parameters(recurse=False), module.named_buffers(recurse=False)
    return [(module, name) for named in kinds for name, _ in named]


def _taken_off(model: PreTrainedModel) -> dict[str, tuple[str, str]]:
    """Remove accelerate's hooks and return the file of each weight and its name there.

    The hooks would load each linear by itself in every forward.
    """
    index: dict[str, dict[str, str]] = {}
    for module in model.modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if weights is not None:
            index = weights.dataset.index  # the index of all weights
    remove_hook_from_module(model, recurse=True)
    for module in model.modules():  # a leftover bound forward would outlive a change of class
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward
    del model.hf_device_map
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    places = {n: (each["safetensors_file"], each["weight_name"]) for n, each in index.items()}
    return {name: place for name, place in places.items() if name in own}


# Layer by layer.

SHARE = 0.5
"""Fraction of device memory for data other than one layer: hidden states before they go to files,
or weights that are fitted in parallel."""


class BlockInputs(NamedTuple):
    """The arguments of decoder layers for one batch."""

    hidden: Tensor
    """The hidden state before the first layer, `(B, S, D)`."""
    kwargs: list[dict[str, Any]]
    """Arguments per layer, except the hidden state: masks, rotary tables."""


def fits_in_memory(model: LanguageModel, num_bytes: int) -> bool:
    """Return whether `num_bytes` are at most `SHARE` of the memory of the model's device."""
    room = on(model.device).memory_gib()
    return room is None or num_bytes <= SHARE * room * GIB


class StateStore:
    """Stores hidden states on their device, or in files if they are many."""

    def __init__(self, model: LanguageModel, num_bytes: int) -> None:
        """Choose the place by `num_bytes`, the total to be stored at once."""
        self._device, self._folder = model.device, model.folder
        self._fits = fits_in_memory(model, num_bytes)
        if not self._fits:
            logger.info(
                "hidden states of up to %.1f GiB, with room for %.1f, go to files in %s",
                num_bytes / GIB,
                SHARE * (on(model.device).memory_gib() or 0.0),
                self._folder or tempfile.gettempdir(),
            )

    def put(self, value: object) -> Any:
        """Return what to hold in place of `value`, a tensor or a structure of tensors."""
        if self._fits:
            return value
        return tree_map_only(Tensor, partial(to_file, folder=self._folder), value)

    def get(self, stored: object) -> Any:
        """Return the stored value on the device."""
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device), stored)


def record_block_inputs(model: LanguageModel, layers: nn.ModuleList, batch: Tokens) -> BlockInputs:
    """Record the arguments of all decoder layers; only the first runs, its output is reused."""
    first: list[Tensor] = []
    stand_in: list[Tensor | tuple] = []
    kwargs: list[dict[str, Any]] = []

    def note(forward: Callable) -> Callable:
        def call(*args: Tensor, **named: object) -> Tensor | tuple:
            if not stand_in:
                first.append(args[0] if args else named["hidden_states"])
                stand_in.append(forward(*args, **named))
            named |= zip([*inspect.signature(forward).parameters][1:], args[1:], strict=False)
            left_out = ("hidden_states", CACHE)
            kwargs.append({key: value for key, value in named.items() if key not in left_out})
            return stand_in[0]

        return call

    with patched_forwards({layer: note(layer.forward) for layer in layers}):
        model.hidden(*(ids.to(model.device) for ids in batch))
    if len(kwargs) != len(layers):
        raise LookupError(f"{len(layers)} layers are called {len(kwargs)} times")
    return BlockInputs(first[0], kwargs)


def record_all_inputs(
    model: LanguageModel, layers: nn.ModuleList, batches: Sequence[Tokens]
) -> Iterator[BlockInputs]:
    """Yield `record_block_inputs` of each batch; the embedding and first layer stay in memory."""
    with model.present(model.model.get_input_embeddings()), model.present(layers[0]):
        for batch in batches:
            yield record_block_inputs(model, layers, batch)


@torch.no_grad()
def hidden_layer_by_layer(model: LanguageModel, batches: Sequence[Tokens]) -> Iterator[Tensor]:
    """Yield `model.hidden` of each batch, with all batches through one layer before the next.

    The results are `(B, S, D)`. Each weight is read once for all batches.

    Raises:
        CheckpointError: the layers of this architecture cannot be run one by one.
    """
    layers = decoder_layers(model.model)
    with as_checkpoint_error(model, "which --device-map disk needs; choose another"):
        inputs = [*record_all_inputs(model, layers, batches)]
        store = StateStore(model, sum(each.hidden.nbytes for each in inputs))
        states: list[object] = [store.put(each.hidden) for each in inputs]
        for number, layer in enumerate(layers):
            with model.present(layer):
                for place, each in enumerate(inputs):
                    hidden = output_of(store.get(states[place]))
                    states[place] = store.put(layer(hidden, **each.kwargs[number]))
    for batch, state in zip(batches, states, strict=True):
        given = store.get(state)
        with patched_forwards({layer: lambda *_, given=given, **__: given for layer in layers}):
            found = model.hidden(*(ids.to(model.device) for ids in batch))
        yield found


def output_of(output: Tensor | tuple) -> Tensor:
    """Return the hidden state from the output of a decoder layer."""
    return output[0] if isinstance(output, tuple | list) else output


@contextmanager
def as_checkpoint_error(model: LanguageModel, needs: str) -> Iterator[None]:
    """Convert errors of decoder layers run one by one, which some architectures do not allow.

    Raises:
        CheckpointError: the architecture does not allow it; `needs` completes the message.
    """
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise CheckpointError(
            f"the decoder layers of {type(model.model).__name__} cannot be run one by one "
            f"({' '.join(str(error).split())[:200]}), {needs}"
        ) from error


@contextmanager
def patched_forwards(forwards: dict[nn.Module, Callable]) -> Iterator[None]:
    """Replace the `forward` of each module in the block."""
    own = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in own.items():
            del module.forward
            if forward is not None:
                module.forward = forward
