"""Gives every quantizable matrix a linear of its own, however the model stores it.

Most decoders are made of `nn.Linear`. Others are not: GPT-2's `Conv1D` keeps its weight transposed,
and a mixture of experts keeps the matrices of E experts in one parameter. `open_sites` replaces
each such weight by a linear without changing the function; from there on plans, calibration,
training, checkpoints and exports deal with linears only. `close_sites` undoes it, for files that
transformers alone must read.

Experts become one linear whose weight `(E * O, I)` stacks theirs. The linear is never called: when
the module that owned the parameter runs, it finds the stacked weight in place of its parameter, as
`(E, O, I)`, and transformers' own grouped products use it. The same holds for a module that
multiplies by the weight of a linear itself (the latent attention of DeepSeek, parts of Mamba). Of
the products inside such modules, only those with the module's own input can have that input
quantized (`unseen_input`).

A family with a layout of its own is one entry in `STACKS`.

Shapes: E experts, O out_features and I in_features of one of them.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from types import MethodType
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers.pytorch_utils import Conv1D

from qat.nn.quant_linear import QuantLinear

INNER = "down_proj"  # the projection of an expert whose input is the result of its others
PROJECTIONS = ("gate_up_proj", "up_proj", INNER)  # experts in transformers' interface


class Stack(NamedTuple):
    """The parameters of a class that hold experts: as `(E, O, I)`, or transposed as `(E, I, O)`."""

    names: tuple[str, ...]
    is_transposed: bool = False


STACKS = {  # by class name, for experts that do not use transformers' interface
    "Llama4TextExperts": Stack(PROJECTIONS, is_transposed=True),
    "LongcatFlashExperts": Stack(PROJECTIONS),
    "JetMoeParallelExperts": Stack(("weight",)),
    "InklingSharedExperts": Stack(("gate_proj", "up_proj", "down_proj")),
}
PRODUCTS = (F.linear, torch.matmul, torch.bmm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm)
"""Operators that multiply inputs by the weight of an expert."""
ROUTERS = ("gate", "router", "shared_expert_gate", "shared_gate")
"""Names of modules that choose experts: a few outputs per token that all later results depend on,
so they stay in floating point.
"""


MORE_THAN_LINEAR = (  # their matrices do not map a whole token linearly: they stay in floats
    "Llama4Router",
    "PhimoeTopKRouter",
    "DeepseekV4GroupedLinear",
    "RecurrentGemmaRglru",
)
NARROWEST = 16  # fewest inputs of a quantized linear: below, scales cost more than indices save


class TransposedLinear(nn.Linear):
    """A linear in place of a `Conv1D`, with its weight transposed."""


class StackedLinear(nn.Linear):
    """The weights of E experts, stacked to `(E * O, I)`; used by its owner, never called."""


class Owner:
    """A module that reads weights itself; it gets the formed ones in place of its parameters.

    `open_sites` changes a module's class to a subclass of this one.
    """

    _read: tuple[str, ...]  # names of the linears whose `weight` the module reads

    _opened: dict[str, tuple[int, bool]]  # E, and true if it was stored as `(E, I, O)`

    _own_forward: Callable[..., Any]  # the forward of the module's original class

    _watch: Callable[[str, int, Tensor], None] | None = None
    """Called with a parameter's name, an expert and `(N, I)` for each input multiplied by it."""

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the original forward with formed weights in place of the module's parameters."""
        hidden_states = next(x for x in (*args, *named.values()) if isinstance(x, Tensor))
        children: dict[str, Any] = self._modules  # type: ignore[attr-defined]
        found: dict[str, Any] = {}
        readers = [children[n] for n in self._opened if isinstance(children[n], QuantLinear)]
        quantizer = next((r.activation for r in readers if r.activation is not None), None)
        if quantizer is not None:  # once for all experts of a token
            put = {id(hidden_states): quantizer(hidden_states)}
            args = tuple(put.get(id(x), x) for x in args)
            named = {name: put.get(id(x), x) for name, x in named.items()}
        for name, (experts, is_transposed) in self._opened.items():
            weight = weight_for(children[name], hidden_states)
            weight = weight.view(experts, -1, weight.shape[1])
            found[name] = weight.mT if is_transposed else weight
        watched = nullcontext() if self._watch is None else _Products(self, found)
        for name in self._read:
            linear = children[name]
            if isinstance(linear, QuantLinear):
                found[name] = _AttributeView(linear, {"weight": weight_for(linear, hidden_states)})
        with watched:
            # the compiler does not allow changing a module while it is traced
            return self._own_forward(_AttributeView(self, found), *args, **named)


class _AttributeView:
    """A view of a module for its own code, with other values for some attributes."""

    def __init__(self, module: Any, found: dict[str, Any]) -> None:
        self._module, self._found = module, found

    def __getattr__(self, name: str) -> Any:
        if name in self._found:
            return self._found[name]
        value = getattr(self._module, name)
        if isinstance(value, MethodType) and value.__self__ is self._module:
            return partial(value.__func__, self)  # so that its methods see these values too
        return value

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._module(*args, **named)


class _Products(TorchFunctionMode):
    """Reports each product with one of an `Owner`'s stacks to it, one expert at a time.

    Every implementation of experts in transformers ends in a product with the weight of one or all.
    """

    def __init__(self, owner: Any, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._owner, self._weights = owner, weights
        self._stacks = {self._place(weight): name for name, weight in weights.items()}

    @staticmethod
    def _place(weight: Tensor) -> int:
        return weight.untyped_storage().data_ptr()

    def __enter__(self) -> Self:
        config: Any = getattr(self._owner, "config", None)
        self._implementation = getattr(config, "_experts_implementation", None)
        if self._implementation is not None:
            config._experts_implementation = "eager"  # one expert after the other
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        if self._implementation is not None:
            self._owner.config._experts_implementation = self._implementation
        super().__exit__(*error)

    def __torch_function__(
        self, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func in PRODUCTS and self._place(args[1]) in self._stacks:
            x, weight = args[:2]
            name = self._stacks[self._place(weight)]
            whole = self._weights[name]
            if weight.dim() == 2:
                first = weight.storage_offset() - whole.storage_offset()
                self._owner._watch(name, first // whole.stride(0), x)
            else:
                for expert, rows in enumerate(x):
                    self._owner._watch(name, expert, rows)
        return func(*args, **(kwargs or {}))


@contextmanager
def watching(owner: Owner, watch: Callable[[str, int, Tensor], None]) -> Iterator[None]:
    """Call `watch` inside the block with the inputs that experts of `owner` multiply weights by."""
    owner._watch = watch
    try:
        yield
    finally:
        owner._watch = None


def weight_for(linear: nn.Linear | QuantLinear, x: Tensor) -> Tensor:
    """Return the weight `(E * O, I)` that `linear` would multiply `x` by."""
    kind = x.device.type
    is_mixed = torch.is_autocast_enabled(kind)
    if isinstance(linear, QuantLinear):
        return linear.weight_in(torch.get_autocast_dtype(kind) if is_mixed else x.dtype)
    # autocast does not cover grouped products, which would otherwise run in float32
    return linear.weight.to(torch.get_autocast_dtype(kind)) if is_mixed else linear.weight


def experts_of(owner: nn.Module, name: str) -> int:
    """Return E if the child `name` of `owner` holds the weights of experts, else 0."""
    return owner._opened.get(name, (0, False))[0] if isinstance(owner, Owner) else 0


def unseen_input(owner: nn.Module, name: str) -> str | None:
    """Return why the input of the child `name` of `owner` cannot be quantized; None if it can."""
    if not isinstance(owner, Owner):
        return None
    if name in owner._read:
        return "its module multiplies with the weight itself"
    if name in owner._opened and name == INNER:
        return "the experts make its input inside their module"
    return None


def is_plain(module: nn.Module) -> bool:
    """Return whether the module is a linear that does nothing else."""
    is_linear = isinstance(module, nn.Linear) and type(module).__name__ not in MORE_THAN_LINEAR
    return is_linear or isinstance(module, QuantLinear)


def stack_of(module: Any) -> Stack | None:
    """Return the parameters in which `module` keeps experts; None if it has none."""
    if type(module).__name__ in STACKS:
        return STACKS[type(module).__name__]
    if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):  # transformers' interface
        return Stack(PROJECTIONS, module.is_transposed)
    return None


def open_sites(model: nn.Module) -> None:
    """Put a linear in place of each other quantizable weight, without changing the function."""
    pairs = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {*pairs, *pairs.values()}
    names_of: dict[nn.Module, str] = {}
    for module_name, owned in [*model.named_modules(remove_duplicate=False)]:
        module: Any = owned
        for name, child in [*module.named_children()]:
            if isinstance(child, Conv1D):
                child = _opened_conv(child)
                setattr(module, name, child)
                module.transposes = name
            names_of[child] = f"{module_name}.{name}".lstrip(".")
            if isinstance(child, nn.Linear):
                is_tied = f"{names_of[child]}.weight" in tied
                if child.in_features < NARROWEST or is_tied or not is_plain(child):
                    cast(Any, child).stays_float = True
        if isinstance(module, Owner) or hasattr(module, "base_model_prefix"):
            continue  # whole models read only the dtype of their head
        stack = stack_of(module) or Stack(())
        weights = {name: module._parameters.get(name) for name in stack.names}
        names = [name for name, w in weights.items() if w is not None and w.dim() == 3]
        linears = [n for n, child in module.named_children() if isinstance(child, nn.Linear)]
        read = tuple(name for name in linears if reads_weight(type(module), name))
        if names or read:
            module.__class__ = _owner_class(cast(Hashable, type(module)))
            module._opened, module._read = {}, read
            for name in names:
                _open_stack(module, name, stack.is_transposed)
    for part in (part for router in routers(model).values() for part in router.modules()):
        cast(Any, part).stays_float = True


def odd_site(model: nn.Module) -> str | None:
    """Describe a weight that the model's own files do not store as a linear's; None without one."""
    for name, module in model.named_modules():
        if isinstance(module, Owner) and module._opened:
            return f"{name} keeps experts in one tensor"
        if hasattr(module, "transposes"):
            return f"{name}.{module.transposes} keeps its weight transposed"
    return None


def routers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that choose experts, by name."""
    found: dict[str, nn.Module] = {}
    for parent_name, parent in model.named_modules():
        children = dict(parent.named_children())
        if "experts" in children or any(stack_of(child) for child in children.values()):
            names = children.keys() & set(ROUTERS)
            found |= {f"{parent_name}.{n}".lstrip("."): children[n] for n in sorted(names)}
    return found


def close_sites(model: nn.Module) -> None:
    """Undo `open_sites`, for linears in floating point."""
    modules: list[Any] = [*model.modules()]
    for module in modules:
        for name, child in [*module.named_children()]:
            if isinstance(child, TransposedLinear):
                setattr(module, name, _closed_conv(child))
                vars(module).pop("transposes", None)
        if isinstance(module, Owner):
            owner: Any = module
            for name, (experts, is_transposed) in module._opened.items():
                weight = owner._modules.pop(name).weight
                weight = weight.detach().view(experts, -1, weight.shape[1])
                weight = weight.mT.contiguous() if is_transposed else weight
                owner.register_parameter(name, nn.Parameter(weight))
            del module._opened, module._read
            module.__class__ = type(module).__mro__[2]


def reads_weight(own: type, name: str) -> bool:
    """Return whether the code of a class reads the weight of its linear or table `name` itself."""
    return name in _weights_read(cast(Hashable, own))


@cache
def _weights_read(own: Hashable) -> frozenset[str]:
    try:
        source = inspect.getsource(cast(type, own))
    except (OSError, TypeError):  # the class has no source file
        return frozenset()
    return frozenset(re.findall(r"self\.(\w+)\.weight\b", source))


@cache
def _owner_class(own: Any) -> type[nn.Module]:
    own_forward = staticmethod(own.forward)
    return type(own.__name__, (Owner, own), {"__doc__": own.__doc__, "_own_forward": own_forward})


def _open_stack(module: Any, name: str, is_transposed: bool) -> None:
    weight = module._parameters.pop(name)
    rows = weight.detach().mT if is_transposed else weight.detach()
    linear = StackedLinear(rows.shape[2], len(rows) * rows.shape[1], bias=False, device="meta")
    linear.weight = nn.Parameter(rows.reshape(-1, rows.shape[2]), weight.requires_grad)
    module._opened[name] = (len(rows), is_transposed)
    module.add_module(name, linear)


def _opened_conv(conv: Conv1D) -> TransposedLinear:
    I, O = conv.weight.shape
    linear = TransposedLinear(I, O, device="meta")
    linear.weight = nn.Parameter(conv.weight.detach().T.contiguous(), conv.weight.requires_grad)
    linear.bias = conv.bias
    return linear.train(conv.training)


def _closed_conv(linear: TransposedLinear) -> Conv1D:
    O, I = linear.weight.shape
    with torch.device("meta"):
        conv = Conv1D(O, I)
    conv.weight = nn.Parameter(linear.weight.detach().T.contiguous())
    conv.bias = linear.bias
    return conv.train(linear.training)
