"""Dense causal attention over the same inputs: what Native Sparse Attention is on short rows."""

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from qat.kernels.nsa.inputs import Inputs
from qat.kernels.nsa.reference import causal_mask


def attend_densely(inputs: Inputs) -> Tensor:
    """`(B, S, H, D)`: one softmax over all keys of the query's past and document; no gates."""
    mask = None if inputs.first is None else causal_mask(inputs)[:, None]
    out = scaled_dot_product_attention(
        inputs.query,
        inputs.key,
        inputs.value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=inputs.scale,
        enable_gqa=inputs.group > 1,
    )
    return out.transpose(1, 2)
