"""The configurations that tuning tries, by kernel; each is one of `qat.kernels.tuned`.

Triton is imported where a space is asked for: without it there is nothing to tune.
"""

from itertools import product

from qat.bench.kernels.case import Size, Space

PACKED = (
    (16, 32, 1, 4, 64),
    (16, 32, 1, 4, 96),
    (8, 32, 1, 2, 96),
    (32, 32, 1, 4, 128),
    (4, 128, 1, 4, 64),
    (4, 128, 1, 4, 128),
    (2, 128, 1, 2, 96),
    (8, 128, 1, 8, 96),
)
"""Rows, units, depth, warps and registers."""
DENSE = ((4, 512, 1, 4), (4, 512, 5, 4), (8, 512, 1, 8), (2, 512, 5, 4), (4, 1024, 2, 4))


def matvec_space(size: Size, bits: int, *, is_short: bool) -> Space:
    """Tiles of a matrix times a vector; with `is_short`, of tensor cores where they can."""
    from qat.kernels.lut_matvec import MMA_BITS, MMA_INPUTS, UNIT
    from qat.kernels.lut_matvec_tiles import Tile, tile_for

    I, is_dense = size["I"], bits == 16
    key = (size["O"], I, bits)
    if is_short and bits in MMA_BITS and I % MMA_INPUTS == 0:
        return _mma_space(key)
    listed = DENSE if is_dense else PACKED
    tiles = [Tile(*t[:4], registers=0 if is_dense else t[4]) for t in listed]
    # not those of which more than a third would lie outside the row
    widths = [tile.units * tile.depth * (1 if is_dense else UNIT) for tile in tiles]
    fitting = [t for t, w in zip(tiles, widths, strict=True) if I % w == 0 or I > 2 * w]
    return _space("lut_matvec", key, tile_for(*key), fitting)


def _mma_space(key: tuple[int, int, int]) -> Space:
    from qat.kernels.lut_matvec import UNIT
    from qat.kernels.lut_matvec_tiles import MmaTile, mma_tile_for

    units = key[1] // UNIT
    cuts = [MmaTile(*one) for one in product((1, 2, 4), (1, 2, 4, 8, 16))]
    fitting = [cut for cut in cuts if 4 * cut.units * cut.warps <= units]
    return _space("lut_mma", key, mma_tile_for(*key), fitting)


def form_space(size: Size, bits: int, *, is_packed: bool) -> Space:
    """Tiles of a weight that is formed."""
    from qat.kernels.lut_weight_triton import FormTile

    key = (size["O"], size["I"], bits if is_packed else 0, 2**bits)
    return _space("lut_form", key, FormTile(), [FormTile(w) for w in (1024, 2048, 8192)])


def gated_space(size: Size, kernel: str) -> Space:
    """Columns of a gated unit's program."""
    from triton import next_power_of_2

    from qat.kernels.glu_triton import LARGEST_BLOCK, Cut

    most = next_power_of_2(size["F"])
    cuts = [Cut(block, w) for block, w in product((512, 1024, 2048, 4096), (2, 4, 8))]
    fitting = [cut for cut in cuts if cut.block <= most]
    return _space(kernel, (size["F"],), Cut(min(LARGEST_BLOCK, most)), fitting)


def gather_space(size: Size, kernel: str) -> Space:
    """Pieces of chosen words' weights."""
    from qat.kernels.head_triton import Gather

    listed = product((4, 8, 16, 32), (128, 256, 512, 1024), (2, 4, 8))
    pieces = [Gather(*one) for one in listed if 1024 <= one[0] * one[1] / (one[2] / 4) <= 8192]
    return _space(kernel, (size["K"], size["D"]), Gather(), pieces)


def block_pass_space(size: Size) -> Space:
    """Blocks of a program of the pass over logits."""
    from qat.kernels.topk_triton import BlockPass

    listed = [BlockPass(*one) for one in product((16, 32, 64, 128), (2, 4, 8))]
    return _space("top_k_blocks", (size["V"],), BlockPass(), listed)


def _space(kernel: str, key: tuple[int, ...], default: tuple, listed: list) -> Space:
    return Space(kernel, key, default, tuple(c for c in dict.fromkeys(listed) if c != default))
