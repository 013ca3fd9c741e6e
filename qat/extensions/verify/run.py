"""`qat verify-export`: a model beside the file that was made of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from qat.data.sources import open_source, whole_text
from qat.errors import DataError
from qat.extensions.lab.positions import CHUNK, Context, Judged, Position, text_contexts
from qat.extensions.verify.config import VerifyConfig
from qat.extensions.verify.facts import Finding, Side
from qat.extensions.verify.opening import located, open_reference, open_side
from qat.extensions.verify.settings import (
    check_same_model,
    compare_rope,
    compare_settings,
    compare_ties,
)
from qat.extensions.verify.tensors import Difference, compare_weights
from qat.extensions.verify.tokens import compare_tokens
from qat.logs import progress
from qat.models.language_model import judging

LETTERS = 16
"""Letters of text that are read for each token wanted; a token has about 4."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on a file compared with its reference."""

    form: str
    """The kind of file."""
    distance: Judged | None
    """The distance of its predictions; None if the file makes no model."""
    tensors: list[Difference]
    """All weights that could be compared, the most different first."""
    findings: list[Finding]

    @property
    def passes(self) -> bool:
        """Return whether nothing was found."""
        return not self.findings


def verify(reference: str, file: str, config: VerifyConfig) -> Verdict:
    """Compare the model `file` with `reference`.

    Both are read as floats and run in float32 here, an ONNX file in ONNX Runtime; what another
    engine rounds besides is not part of it.

    Raises:
        CheckpointError: one of them is missing, damaged, or of a kind that is not read.
        ConfigError: they are not two forms of one model.
        DataError: the text is too short.
    """
    for each in (reference, file):  # before the first is opened, which may take minutes
        located(each)
    ours, theirs = open_reference(reference, config.device), open_side(file, config.device)
    check_same_model(ours, theirs)
    alike, head = _with_head_as_in(theirs, ours)
    tensors, findings = compare_weights(alike, theirs)
    if ours.is_tied:  # a head of its own was made of the embedding
        findings = [f._replace(kind="tied-head") if f.place == head else f for f in findings]
    findings += [*compare_ties(ours, theirs), *compare_settings(ours, theirs)]
    findings += [*compare_rope(ours, theirs), *compare_tokens(ours, theirs)]
    distance = None
    if theirs.model is not None or theirs.program is not None:
        distance = measure(ours, theirs, config)
        findings += _too_far(distance, config)
    return Verdict(theirs.form, distance, tensors, findings)


def _with_head_as_in(theirs: Side, ours: Side) -> tuple[Side, str]:
    """Return `ours` with a head's table of its own if `theirs` has one, and the head's name."""
    model = ours.model.model
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = (
        f"{names[id(module)]}.weight"
        for module in (model.get_input_embeddings(), model.get_output_embeddings())
    )
    weights = dict(ours.weights)
    if ours.is_tied and not theirs.is_tied:
        weights[head] = weights[embedding]
    elif theirs.is_tied:
        weights.pop(head, None)
    return replace(ours, weights=weights), head


def _too_far(distance: Judged, config: VerifyConfig) -> Iterator[Finding]:
    if not distance.kl_nats <= config.max_kl:  # NaN too
        words = f"{distance.kl_nats:.4g} nats a token, expected at most {config.max_kl:g}"
        yield Finding("distance", "KL", words)
    if not distance.top1_frac >= config.min_top1:
        words = f"{distance.top1_frac:.2%}, expected at least {config.min_top1:.2%}"
        yield Finding("distance", "top-1", words)


def measure(ours: Side, theirs: Side, config: VerifyConfig) -> Judged:
    """Return how far the predictions of `theirs` are from those of `ours` on a text.

    Raises:
        DataError: the text is too short for one context.
    """
    contexts, found = read_contexts(ours, config), []
    with progress("running both models", len(contexts), "contexts") as ticker:
        for each in contexts:
            ids = torch.tensor([each.ids])
            expected, logits = (_logits(side, ids)[0, each.places] for side in (ours, theirs))
            parts = (part.split(CHUNK) for part in (logits, expected, each.labels))
            found += map(Position.of, *parts)
            ticker.advance(1)
    return Judged.of(Position(*map(torch.cat, zip(*found, strict=True))))


def _logits(side: Side, ids: Tensor) -> Tensor:
    if side.program is not None:
        return side.program(ids)
    model = side.model
    with judging(model):
        places = torch.arange(ids.shape[1], device=model.device)[None]
        return model.logits(model.hidden(ids.to(model.device), places)).cpu()


def read_contexts(ours: Side, config: VerifyConfig) -> Sequence[Context]:
    """Return the contexts of the text in the reference's tokens.

    Raises:
        DataError: the text is too short.
    """
    length = min(config.context, ours.model.longest)
    tokens = ours.tokenizer(_text(config), add_special_tokens=False, verbose=False).input_ids
    found = list(text_contexts(tokens, ours.tokens.begin, length))[: config.contexts]
    if not found:
        raise DataError(
            f"text={config.text} holds {len(tokens)} tokens, expected {length} or more; give a "
            "longer text or a smaller --context"
        )
    return found


def _text(config: VerifyConfig) -> str:
    wanted = LETTERS * config.context * config.contexts
    if config.text is not None:
        return whole_text(config.text)[:wanted]
    documents = [*open_source("stdlib").documents]
    begins = accumulate(map(len, documents), initial=0)
    few = takewhile(lambda pair: pair[1] < wanted, zip(documents, begins, strict=False))
    return "\n\n".join(document for document, _ in few)
