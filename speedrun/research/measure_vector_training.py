"""What may beat the nearest codeword in training: ways to choose codes of two bits a weight.

Every linear of a real model is quantized and distilled from itself as it was (exact KL to the
teacher that runs beside), by plain PyTorch: what wins is built into `qat`, what loses is told in
the log. Each way starts from the same levels or codewords, learns latent weights, codebook and
scales, and is judged on rows that are kept away.

python speedrun/research/measure_vector_training.py --model DIR --text FILE --out OUT

Shapes: O out_features, I in_features, C codewords, d weights of one, N vectors.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from cyclopts import App, Parameter
from nsa_students import divergence, log_probs, lr_share, token_batches
from torch import Tensor, nn
from torch.nn import functional as F

from qat.backend.device import select
from qat.logs import configure
from qat.models.language_model import LanguageModel
from qat.models.load import load_model, load_tokenizer
from qat.nn.swap import linear_names, replace_module
from qat.quant.fit import fit_weight
from qat.quant.spec import LutSpec
from qat.quant.weight import QuantizedWeight, Scales, expand_scales, rms, round_scales

app = App(help=__doc__)
FOURS = LutSpec(bits=8, vector_size=4, group_size=32, scale_bits=8)
LEVELS = LutSpec(bits=2, group_size=16, scale_bits=8)
STATES = 256
"""Of the trellis: the last four indices of two bits."""
RATES = {"weight": 5e-4, "codebook": 1e-3, "scales": 1e-3}
"""A step moves a tensor by about this share of its size."""
FIT_ROUNDS = 6
"""In which a trellis, its levels and its scales take turns before training."""
SOFT_STEPS = 0.7
"""Share of the steps after which a soft assignment is hard."""


class Student(nn.Module):
    """A linear that computes with codewords; a way below says which."""

    def __init__(self, weight: Tensor, fitted: QuantizedWeight, importance: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())
        self.codebook = nn.Parameter(fitted.codebook.clone())
        self.scales = nn.Parameter(fitted.scales.by_group().clone())
        self.scale_bits = fitted.scales.bits
        self.register_buffer("importance", importance)
        self.done = 0.0
        """Share of the steps that are taken."""

    def S(self) -> Tensor:
        """The scales as stored, gradients passed straight through; `(O, I)`."""
        stored = round_scales(Scales(self.scales.detach(), bits=self.scale_bits)).by_group()
        through = stored + (self.scales - self.scales.detach())
        return expand_scales(Scales(through, bits=self.scale_bits), self.weight.shape[1])

    def codewords(self) -> Tensor:
        """`(C, d)`."""
        book = self.codebook
        return book[:, None] if book.dim() == 1 else book

    def weights_of_errors(self) -> Tensor | None:
        """How much an error counts, `(I,)`; None where all count alike."""
        return None

    def scores(self, W: Tensor, S: Tensor) -> Tensor:
        """Minus half the squared distance of each vector from each codeword, but for a constant."""
        c = self.codewords().detach()
        h = self.weights_of_errors()
        h = torch.ones_like(W) if h is None else h.expand_as(W)
        d = c.shape[1]
        pulls = torch.cat([(h * W * S).reshape(-1, d), (h * S * S * -0.5).reshape(-1, d)], 1)
        return pulls @ torch.cat([c, c * c], 1).T

    def chosen(self, W: Tensor, S: Tensor) -> Tensor:
        """What the weight is made of under its scales, `(O, I)`, gradients to the codebook."""
        with torch.no_grad():
            indices = self.scores(W, S).argmax(1)
        return self.codewords()[indices].view_as(W)

    def latent(self) -> Tensor:
        """Where the codes are chosen."""
        return self.weight

    def back(self, W: Tensor) -> Tensor:
        """From there to the weight."""
        return W

    def formed(self) -> Tensor:
        """The weight, its gradient passed straight through to the latent one."""
        latent, S = self.latent(), self.S()
        made = self.chosen(latent.detach(), S.detach()) * S
        return self.back(made + (latent - latent.detach()))

    def forward(self, x: Tensor) -> Tensor:
        """`x` times the formed weight."""
        return F.linear(x, self.formed().to(x.dtype))


class Soft(Student):
    """A mean of codewords by how near they are, which sharpens until it is the nearest one."""

    def chosen(self, W: Tensor, S: Tensor) -> Tensor:
        """A mean of codewords until `SOFT_STEPS` are done."""
        left = 1 - self.done / SOFT_STEPS
        if left <= 0 or not self.training:
            return super().chosen(W, S)
        c = self.codewords()
        distance = -2 * self.scores(W, S)
        spread = (S * S).mean() * c.detach().var() * left**2
        return (-distance / spread.clamp_min(1e-12)).softmax(1).mm(c).view_as(W)


class ByCurvature(Student):
    """Errors count by the mean square of the input that they meet."""

    def weights_of_errors(self) -> Tensor:
        """The mean square of each input feature."""
        return self.importance


class Residual(Student):
    """The sum of two codewords of 16 each: as many indices from an eighth of the codebook."""

    def __init__(self, weight: Tensor, fitted: QuantizedWeight, importance: Tensor) -> None:
        super().__init__(weight, fitted, importance)
        full = fitted.codebook
        first = full[torch.randperm(len(full), generator=torch.Generator().manual_seed(0))[:16]]
        second = torch.zeros_like(first)
        for _ in range(30):  # alternately the nearest sum, and the mean of what is left
            sums = (first[:, None] + second[None]).flatten(0, 1)
            nearest = torch.cdist(full, sums).argmin(1)
            for book, place, other in ((first, nearest // 16, second[nearest % 16]),
                                       (second, nearest % 16, first[nearest // 16])):  # fmt: skip
                rest = full - other
                for entry in range(16):
                    if (place == entry).any():
                        book[entry] = rest[place == entry].mean(0)
                    else:
                        book[entry] = rest[rest.norm(dim=1).argmax()]
        self.codebook = nn.Parameter(torch.stack([first, second]))

    def codewords(self) -> Tensor:
        """Every sum of two."""
        first, second = self.codebook
        return (first[:, None] + second[None]).flatten(0, 1)


class Rotated(Student):
    """Codes are chosen after a random Hadamard rotation of each group of input features."""

    def __init__(self, weight: Tensor, fitted: QuantizedWeight, importance: Tensor) -> None:
        size = FOURS.group_size
        signs = torch.randint(2, (size,), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
        H = torch.ones(1, 1)
        while len(H) < size:
            H = torch.cat([torch.cat([H, H], 1), torch.cat([H, -H], 1)])
        rotation = (signs[:, None] * H / math.sqrt(size)).to(weight.device)
        turned = (weight.unflatten(1, (-1, size)) @ rotation).flatten(1)
        super().__init__(weight, fit_weight(turned, FOURS), importance)
        self.register_buffer("rotation", rotation)

    def latent(self) -> Tensor:
        """Each group of input features rotated."""
        return (self.weight.unflatten(1, (-1, len(self.rotation))) @ self.rotation).flatten(1)

    def back(self, W: Tensor) -> Tensor:
        """Each group rotated back."""
        return (W.unflatten(1, (-1, len(self.rotation))) @ self.rotation.T).flatten(1)


class Trellis(Student):
    """One level a weight from 256, of which the three indices before allow four (QTIP's bit shift,
    arXiv:2406.11235); the best path of each row every few steps, its indices kept between."""

    every = 10

    def __init__(self, weight: Tensor, fitted: QuantizedWeight, importance: Tensor) -> None:
        super().__init__(weight, fitted, importance)
        quantiles = (torch.arange(STATES) + 0.5) / STATES
        gauss = torch.distributions.Normal(0, 1).icdf(quantiles)
        order = torch.randperm(STATES, generator=torch.Generator().manual_seed(2))
        size = fitted.codebook.pow(2).mean().sqrt().item()
        self.codebook = nn.Parameter((gauss[order] * size).to(weight.device))
        self.states: Tensor | None = None
        self.calls = 0
        for _ in range(FIT_ROUNDS):
            self.refit()

    @torch.no_grad()
    def refit(self) -> None:
        """Find the best path, then the levels and the scales of least squares for it."""
        O, I = self.weight.shape
        S = self.S()
        states = best_path(self.weight, S, self.codebook)
        sums, squares = (
            torch.bincount(states.flatten(), part.flatten(), minlength=STATES)
            for part in (self.weight * S, S * S)
        )
        self.codebook.copy_(
            torch.where(squares > 0, sums / squares.clamp_min(1e-30), self.codebook)
        )
        c = self.codebook[states].view(O, self.scales.shape[1], -1)
        W = self.weight.view_as(c)
        self.scales.copy_((W * c).sum(2) / (c * c).sum(2).clamp_min(1e-30))

    def chosen(self, W: Tensor, S: Tensor) -> Tensor:
        """The levels of the best path, which is found anew every few steps."""
        if self.states is None or (self.training and self.calls % self.every == 0):
            self.states = best_path(W, S, self.codebook.detach())
        self.calls += self.training
        return self.codebook[self.states]

    def train(self, mode: bool = True) -> "Trellis":
        """Judging finds the best path of the weights as they are."""
        self.states = self.states if mode else None
        return super().train(mode)


def best_path(W: Tensor, S: Tensor, levels: Tensor) -> Tensor:
    """The states `(O, I)` of the least squared error among paths `s' = (4 s + b) mod 256`."""
    O, I = W.shape
    cost = W.new_zeros(O, STATES)
    came = torch.empty(I, O, STATES // 4, dtype=torch.uint8, device=W.device)
    for i in range(I):
        if i:  # 64 states before, at 64 apart, lead to the four that share their upper bits
            least = cost.view(O, 4, STATES // 4).min(1)
            came[i] = least.indices.to(torch.uint8)
            cost = least.values.repeat_interleave(4, 1)
        cost = cost + (W[:, i, None] - S[:, i, None] * levels) ** 2
    state = cost.argmin(1)
    path = [state]
    for i in range(I - 1, 0, -1):
        upper = state // 4
        state = upper + STATES // 4 * came[i].gather(1, upper[:, None])[:, 0].long()
        path.append(state)
    return torch.stack(path[::-1], 1)


WAYS: dict[str, tuple[type[Student], LutSpec]] = {
    "levels": (Student, LEVELS),
    "nearest codeword": (Student, FOURS),
    "soft, then hard": (Soft, FOURS),
    "by curvature": (ByCurvature, FOURS),
    "two codebooks of 16": (Residual, FOURS),
    "rotated": (Rotated, FOURS),
    "trellis": (Trellis, FOURS),
}


@dataclass(frozen=True)
class Options:
    """How it is measured."""

    device: str = "auto"
    steps: int = 300
    batch_size: int = 64
    length: int = 128
    rows: int = 4096
    """To train on."""
    held_out: int = 128
    """Rows to judge on."""
    rate: float = 1.0
    """Times all rates."""
    only: str = ""
    """Ways to try, joined by semicolons; all for none."""
    seed: int = 0


@app.default
def measure(
    *,
    model: str,
    text: list[Path],
    out: Path,
    options: Annotated[Options, Parameter(name="*")] = Options(),  # noqa: B008 - frozen
) -> None:
    """Append a row for each way to OUT/rows.jsonl.

    Parameters
    ----------
    model
        Float model, a directory or a .gguf file.
    text
        Plain text; rows are cut from all of it.
    """
    configure()
    torch.set_float32_matmul_precision("high")
    device = select(options.device).device
    ids = [load_tokenizer(model)(path.read_text(encoding="utf-8")).input_ids for path in text]
    tokens = torch.tensor([token for part in ids for token in part])
    rows = tokens[: len(tokens) // options.length * options.length].view(-1, options.length)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))].to(device)
    train, kept = rows[options.held_out :][: options.rows], rows[: options.held_out]
    teacher = load_model(model, device=options.device, dtype="fp32")
    teacher.model.requires_grad_(False)
    importance = input_squares(teacher, train[:16])
    out.mkdir(parents=True, exist_ok=True)
    for name, (way, spec) in WAYS.items():
        if options.only and name not in options.only.split(";"):
            continue
        student = load_model(model, device=options.device, dtype="fp32")
        student.model.requires_grad_(False)
        for linear_name in linear_names(student.model):
            linear = student.model.get_submodule(linear_name)
            weight = linear.weight.detach()
            fitted = fit_weight(weight, spec)
            made = way(weight, fitted, importance[linear_name]).to(device)
            replace_module(student.model, linear_name, made)
        row = {"way": name, "model": model, "steps": options.steps, "seed": options.seed}
        student.model.eval()
        row["kl_before"] = divergence(student, teacher, kept, 0).kl
        row["seconds"] = distil(student, teacher, train, options)
        student.model.eval()
        row["kl_after"] = divergence(student, teacher, kept, 0).kl
        with (out / "rows.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name}: KL {row['kl_before']:.4f} to {row['kl_after']:.4f}, "
              f"{row['seconds']:.0f} s", flush=True)  # fmt: skip


@torch.no_grad()
def input_squares(teacher: LanguageModel, rows: Tensor) -> dict[str, Tensor]:
    """The mean square of each input feature of each linear, their mean being 1; by name."""
    found, hooks = {}, []

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, given: tuple[Tensor, ...], _made: Tensor) -> None:
            square = given[0].float().flatten(0, -2).pow(2).mean(0)
            found[name] = square / square.mean()

        return hook

    for name in linear_names(teacher.model):
        module = teacher.model.get_submodule(name)
        hooks.append(module.register_forward_hook(note(name)))
    (batch,) = token_batches(rows, len(rows))
    teacher.hidden(*batch, is_packed=False)
    for hook in hooks:
        hook.remove()
    return found


def distil(student: LanguageModel, teacher: LanguageModel, rows: Tensor, options: Options) -> float:
    """Train what codes, codebooks and scales are made of; seconds that it took."""
    parts = [module for module in student.model.modules() if isinstance(module, Student)]
    groups = [
        {"params": [part.get_parameter(name)],
         "lr": rate * options.rate * rms(part.get_parameter(name))}
        for part in parts
        for name, rate in RATES.items()
    ]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: lr_share(step, options.steps)
    )
    order = torch.Generator().manual_seed(options.seed)
    student.model.train()
    is_bf16 = select(options.device).device.type == "cuda"
    began = time.perf_counter()
    for step in range(options.steps):
        for part in parts:
            part.done = step / options.steps
        chosen = torch.randint(len(rows), (options.batch_size,), generator=order).to(rows.device)
        (batch,) = token_batches(rows[chosen], options.batch_size)
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=is_bf16):
            with torch.no_grad():
                log_p = log_probs(teacher, batch)
            log_q = log_probs(student, batch)
        loss = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for g in groups for p in g["params"]], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return time.perf_counter() - began


if __name__ == "__main__":
    app()
