"""The method `push_to_hub` of models of transformers, which pushes packed ones with a card.

transformers' own makes a repository first, and then cannot save a packed model.
"""

from transformers import PreTrainedModel

from qat.models.stored_state import quantized_modules

push_others = PreTrainedModel.push_to_hub


def let_push() -> None:
    """Let packed models in this process push themselves; others do as before."""
    PreTrainedModel.push_to_hub = push_to_hub


def push_to_hub(model: PreTrainedModel, repo_id: str, **how: object) -> str:
    """Push a model to the repository `repo_id` of the hub, and return its address.

    Of a packed model the keywords are `commit_message`, `private`, and `replace`, for a repository
    that holds files already; its tokenizer and a card are pushed with it.

    Raises:
        HubError: it cannot be pushed.
    """
    if not quantized_modules(model):
        return push_others(model, repo_id, **how)
    from qat.extensions.publish.push import push_student  # loads the library of the hub

    return push_student(model, repo_id, **how).url
