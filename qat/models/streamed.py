"""Models that stay in their files: a layer comes into memory to run, and leaves it behind that.

What is not in memory is a map of a file: it can be read as any tensor, in the dtype of the file,
and takes no memory that somebody else needs. A unit (a decoder layer, the embedding, the head)
that runs, or is wished for by `LanguageModel.present`, has its weights on the device, in the dtype
to compute in, and no other has.

The second half runs a model layer by layer, all batches through one before the next. Shapes: B
sequences, S positions, D model width.
"""

from __future__ import annotations

import inspect
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from accelerate.hooks import remove_hook_from_module
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from qat.backend.base import GIB, SMALL_BYTES
from qat.backend.device import on
from qat.errors import CheckpointError
from qat.nn.quant_linear import QuantLinear
from qat.nn.swap import CACHE, decoder_layers, tables_read

if TYPE_CHECKING:
    from qat.models.language_model import LanguageModel

logger = logging.getLogger(__name__)

ON_DISK = {"": "disk"}
"""Where transformers leaves every weight: in the files where it found it, but for what it makes of
several tensors, such as the experts of a layer, which it writes into files of its own."""
STORED = (torch.float32, torch.bfloat16)
"""Dtypes that a checkpoint of ours has for what is not quantized."""
Slot = tuple[dict[str, Any], str]
"""Where a module keeps a tensor: among its parameters or its buffers, by name."""


def to_file(tensor: Tensor, folder: Path | None) -> Tensor:
    """The same values on the host, in a map of a file without a name; small ones in memory.

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
            # shared, so that nobody takes it for memory of this process
            size = tensor.nbytes
            there = torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8)
    except OSError as error:
        raise CheckpointError(
            f"{folder or tempfile.gettempdir()}: what does not fit in memory cannot be written "
            f"there ({error}); free some space, or choose another disk with --out or TMPDIR"
        ) from error
    return there.view(tensor.dtype).view(tensor.shape)


class InFiles:
    """The units of a model that transformers loaded `ON_DISK`, and what else it has in memory."""

    def __init__(self, model: PreTrainedModel, device: torch.device, folder: Path) -> None:
        """Map the weights of `model`, which so far has none.

        Args:
            device: where it is to compute.
            folder: on a disk with room for what does not fit in memory.

        Raises:
            CheckpointError: a weight is not of the shape that the configuration implies.
        """
        self.device, self.folder, self.dtype = device, folder, model.dtype
        self._in_float32 = tuple(model._keep_in_fp32_modules_strict or ())
        self._brought: dict[nn.Module, list[tuple[Slot, Tensor, Tensor]]] = {}
        self._units: set[nn.Module] = set()
        opened: dict[tuple[str, str], nn.Parameter] = {}
        for name, (file, key) in _taken_off(model).items():
            if (file, key) not in opened:  # what is tied stays so
                with safe_open(file, framework="pt") as tensors:
                    opened[file, key] = nn.Parameter(tensors.get_tensor(key), requires_grad=False)
            owner, _, own = name.rpartition(".")
            slots, found = model.get_submodule(owner)._parameters, opened[file, key]
            if found.shape != slots[own].shape:
                raise CheckpointError(
                    f"{model.name_or_path} holds a {name} of shape {tuple(found.shape)}, expected "
                    f"{tuple(slots[own].shape)}; copy or download it anew"
                )
            slots[own] = found

    def install(self, model: PreTrainedModel) -> None:
        """Let each unit bring its weights when it runs; what is none comes now, and stays."""
        tables = {model.get_input_embeddings(), model.get_output_embeddings()} - {None}
        self._units = {*decoder_layers(model), *(tables - tables_read(model))}
        inside = {module for unit in self._units for module in unit.modules()}
        names = {module: name for name, module in model.named_modules()}
        self._names = names
        stays = self._bring(module for module in names if module not in inside)
        shared = {id(old): new for _, old, new in stays}
        for slots, name in (slot for module in inside for slot in _slots(module)):
            slots[name] = shared.get(id(slots[name]), slots[name])
        for unit in self._units:
            unit.forward = self._bringing(unit, unit.forward)

    @contextmanager
    def present(self, unit: nn.Module) -> Iterator[None]:
        """A block in which `unit` has its weights on the device; nothing for other modules.

        A linear that was quantized in the block goes into files at its end.
        """
        if unit not in self._units or unit in self._brought:
            yield
            return
        before = {*unit.modules()}
        self._brought[unit] = self._bring(before)
        try:
            yield
        finally:
            for (slots, name), old, new in self._brought.pop(unit):
                if slots.get(name) is new:
                    slots[name] = old
            for module in {*unit.modules()} - before:
                self.settle(module)

    def settle(self, module: nn.Module) -> None:
        """Move what a quantized linear holds into files."""
        if isinstance(module, QuantLinear):
            for slots, name in _slots(module):
                kept, old = to_file(slots[name], self.folder), slots[name]
                slots[name] = nn.Parameter(kept) if isinstance(old, nn.Parameter) else kept

    def widen(self, model: nn.Module) -> None:
        """Turn what was not quantized into a dtype that a checkpoint of ours has, as exactly."""
        for parameter in model.parameters():
            if parameter.is_floating_point() and parameter.dtype not in STORED:
                parameter.data = to_file(parameter.float(), self.folder)

    def _bringing(self, unit: nn.Module, forward: Callable) -> Callable:
        @wraps(forward)
        def call(*args: object, **named: object) -> object:
            with self.present(unit):
                return forward(*args, **named)

        return call

    def _bring(self, modules: Iterable[nn.Module]) -> list[tuple[Slot, Tensor, Tensor]]:
        """Put the tensors of modules on the device; where, what was there, and what is now."""
        made: dict[int, Tensor] = {}
        brought = []
        for module in modules:
            for slots, name in _slots(module):
                old = slots[name]
                if id(old) not in made:
                    made[id(old)] = self._on_device(f"{self._names.get(module, '')}.{name}", old)
                new = made[id(old)]
                if new is not old:
                    slots[name] = new
                    brought.append(((slots, name), old, new))
        return brought

    def _on_device(self, name: str, tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        if isinstance(tensor, nn.Parameter) and tensor.is_floating_point():
            is_wide = any(part in name for part in self._in_float32)
            dtype = torch.float32 if is_wide else self.dtype
        there = tensor.data.to(self.device).to(dtype)  # fewer bytes travel
        if there.data_ptr() == tensor.data_ptr():
            return tensor
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(there, requires_grad=False) if is_parameter else there


def _slots(module: nn.Module) -> list[Slot]:
    """Where a module itself keeps tensors."""
    kinds = module._parameters, module._buffers
    return [(slots, name) for slots in kinds for name, held in slots.items() if held is not None]


def _taken_off(model: PreTrainedModel) -> dict[str, tuple[str, str]]:
    """The file of each weight and its name there, taken from the hooks of accelerate, which go.

    They would bring each linear by itself, in each forward anew.
    """
    index: dict[str, dict[str, str]] = {}
    for module in model.modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        if weights is not None:
            index = weights.dataset.index  # that of all
    remove_hook_from_module(model, recurse=True)
    for module in model.modules():  # what it leaves would outlive a change of class
        if getattr(vars(module).get("forward"), "__func__", None) is type(module).forward:
            del module.forward
    del model.hf_device_map
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    places = {n: (each["safetensors_file"], each["weight_name"]) for n, each in index.items()}
    return {name: place for name, place in places.items() if name in own}


@contextmanager
def without_warning_of_disks() -> Iterator[None]:
    """A block in which accelerate does not warn of weights that were left where they are."""
    theirs = logging.getLogger("accelerate.big_modeling")
    theirs.addFilter(_is_of_something_else)
    try:
        yield
    finally:
        theirs.removeFilter(_is_of_something_else)


def _is_of_something_else(record: logging.LogRecord) -> bool:
    return "offloaded to the disk" not in record.getMessage()


# Layer by layer.

SHARE = 0.5
"""Of the memory that the device has, what may be taken by what is not one layer: hidden states,
before they go to files, or weights that are fitted side by side."""


Tokens = tuple[Tensor, Tensor]
"""Ids and positions, `(B, S)` each."""


class BlockInputs(NamedTuple):
    """What one decoder layer is called with for one batch."""

    hidden: Tensor
    """`(B, S, D)`."""
    kwargs: list[dict[str, Any]]
    """Per layer, everything but the hidden state: masks, rotary tables."""


def fits_in_memory(model: LanguageModel, num_bytes: int) -> bool:
    """Return whether so many bytes take at most `SHARE` of the memory of the model's device."""
    room = on(model.device).memory_gib()
    return room is None or num_bytes <= SHARE * room * GIB


class Keeper:
    """Keeps hidden states: on the device where they lie, or in files where they are many."""

    def __init__(self, model: LanguageModel, num_bytes: int) -> None:
        """Decide by `num_bytes`, all that is to be kept at once."""
        self._device = model.device
        self._folder = None if model.in_files is None else model.in_files.folder
        self._fits = fits_in_memory(model, num_bytes)
        if not self._fits:
            logger.info(
                "hidden states of up to %.1f GiB, with room for %.1f, go to files in %s",
                num_bytes / GIB,
                SHARE * (on(model.device).memory_gib() or 0.0),
                self._folder or tempfile.gettempdir(),
            )

    def keep(self, value: object) -> Any:
        """What to hold in the place of `value`, a tensor or a structure of such."""
        if self._fits:
            return value
        return tree_map_only(Tensor, partial(to_file, folder=self._folder), value)

    def back(self, kept: object) -> Any:
        """`value` again, on the device."""
        return tree_map_only(Tensor, lambda tensor: tensor.to(self._device), kept)


def record_block_inputs(model: LanguageModel, layers: nn.ModuleList, batch: Tokens) -> BlockInputs:
    """What every decoder layer is called with. Only the first one runs: its output stands in."""
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
    """Give `record_block_inputs` of each batch, with what they need in memory throughout."""
    with model.present(model.model.get_input_embeddings()), model.present(layers[0]):
        for batch in batches:
            yield record_block_inputs(model, layers, batch)


@torch.no_grad()
def hidden_layer_by_layer(model: LanguageModel, batches: Sequence[Tokens]) -> Iterator[Tensor]:
    """`model.hidden` of each batch, all of them through one layer before the next: `(B, S, D)`.

    Each weight is read once, whatever the number of batches.

    Raises:
        CheckpointError: the layers of this architecture cannot be run one by one.
    """
    layers = decoder_layers(model.model)
    with told(model, "which --device-map disk needs; choose another"):
        inputs = [*record_all_inputs(model, layers, batches)]
        keeper = Keeper(model, sum(each.hidden.nbytes for each in inputs))
        states: list[object] = [keeper.keep(each.hidden) for each in inputs]
        for number, layer in enumerate(layers):
            with model.present(layer):
                for place, each in enumerate(inputs):
                    hidden = output_of(keeper.back(states[place]))
                    states[place] = keeper.keep(layer(hidden, **each.kwargs[number]))
    for batch, state in zip(batches, states, strict=True):
        given = keeper.back(state)
        with patched_forwards({layer: lambda *_, given=given, **__: given for layer in layers}):
            found = model.hidden(*(ids.to(model.device) for ids in batch))
        yield found


def output_of(output: Tensor | tuple) -> Tensor:
    """The hidden state in what a decoder layer gives."""
    return output[0] if isinstance(output, tuple | list) else output


@contextmanager
def told(model: LanguageModel, needs: str) -> Iterator[None]:
    """A block that runs decoder layers by themselves, which some architectures do not allow.

    Raises:
        CheckpointError: this one does not; who `needs` that, and what to do.
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
    """Let each module call another function in place of its `forward`."""
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
