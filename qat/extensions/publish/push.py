"""Pushing of students and exports to a model repository of a hub, with a card."""

import tempfile
from pathlib import Path

from transformers import PreTrainedModel

from qat.errors import VERSION, HubError
from qat.export.model import CARD, float_base
from qat.extensions.publish.card import card_of
from qat.extensions.publish.repository import Pushed, check_push, push_files
from qat.files import described
from qat.hub.files import REPOSITORY, format_of, innermost_directory, kind_of, regular_files
from qat.hub.push import TRAINER
from qat.models.checkpoint import is_packed, load_skeleton, write_checkpoint
from qat.models.load import load_tokenizer
from qat.models.sizes import checkpoint_sizes
from qat.nn.swap import embedding_dtype


def publish(
    directory: Path,
    name: str,
    *,
    source: Path | None = None,
    with_trainer: bool = False,
    message: str | None = None,
    private: bool = False,
    replace: bool = False,
) -> Pushed:
    """Push a model's `directory` to the repository `owner/name`, in one commit.

    A packed checkpoint without a card gets one, with what the run of `source` says, by default that
    of `directory`. The state of training stays here unless `with_trainer`.

    Raises:
        HubError: there is no model, or it cannot be pushed.
        CheckpointError: a file of its run is damaged.
    """
    if not directory.is_dir() or kind_of(root := innermost_directory(directory)) == "cache":
        found = described(directory)
        raise HubError(
            f"{directory} {found}, expected a model for {REPOSITORY}{name}; check the path, or "
            "push a cache to a folder or gs://"
        )
    files: dict[str, Path | bytes] = {
        path.relative_to(root).as_posix(): path
        for path in regular_files(root, None if with_trainer else TRAINER)
    }
    format_of(root, "checkpoint")
    if CARD not in files and is_packed(root):
        files[CARD] = _packed_card(root, source or root, name).encode()
    return push_files(
        files,
        name,
        message=message or f"Upload {name.rpartition('/')[2]} with qat {VERSION}",
        private=private,
        replace=replace,
    )


def push_student(
    model: PreTrainedModel,
    name: str,
    *,
    commit_message: str | None = None,
    private: bool = False,
    replace: bool = False,
) -> Pushed:
    """Push a quantized model in memory as a packed checkpoint.

    Its tokenizer, and what a run says of it, are those of the directory that it was loaded from.

    Raises:
        HubError: it cannot be pushed.
        CheckpointError: nothing of `model` is quantized, or it cannot be written.
    """
    check_push(name, private=private, replace=replace)  # before anything is written
    tokenizer = load_tokenizer(model.name_or_path) if model.name_or_path else None
    with tempfile.TemporaryDirectory(prefix="qat-push-") as place:
        write_checkpoint(model, tokenizer, Path(place))
        return publish(
            Path(place),
            name,
            source=Path(model.name_or_path),
            message=commit_message,
            private=private,
            replace=replace,
        )


def _packed_card(directory: Path, source: Path, repository: str) -> str:
    model, base = load_skeleton(directory), float_base(source)
    return card_of(
        model,
        "packed",
        checkpoint_sizes(directory, None if base == str(directory) else base),
        dtype=str(embedding_dtype(model)).removeprefix("torch."),
        source=source,
        name=repository.rpartition("/")[2],
        repository=repository,
    )
