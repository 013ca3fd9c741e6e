"""The definition of Native Sparse Attention (arXiv 2502.11089) for all backends."""

from typing import Literal, Self

from pydantic import Field, model_validator

from qat.config import Settings

Mode = Literal["residual", "sigmoid", "merged"]
BackendName = Literal["auto", "reference", "flex", "gather", "fla"]


class NSAConfig(Settings):
    """Settings of Native Sparse Attention; sizes count positions unless stated otherwise."""

    mode: Mode = "residual"
    """The combination of branches: `residual` and `sigmoid` gate three of them, `residual` starting
    as selection alone; `merged` is one softmax over first, local and selected blocks, without
    parameters (arXiv 2509.24663)."""
    compress_block: int = Field(32, ge=1)
    """Keys that are pooled into one (l in the paper)."""
    compress_stride: int = Field(16, ge=1)
    """Distance between pooled keys (d); divides both kinds of block."""
    select_block: int = Field(128, ge=1)
    """Keys that are selected together (l')."""
    num_selected: int = Field(16, ge=1)
    """Blocks that a query selects, including the forced ones (n)."""
    window: int = Field(512, ge=1)
    """Last keys that a query always reads, including its own (w); `merged` has no window."""
    init_blocks: int = Field(1, ge=0)
    """Forced blocks at the beginning of the document."""
    local_blocks: int = Field(2, ge=1)
    """Forced blocks up to and including the query's own."""
    select_tile: int = Field(128, ge=1)
    """Queries that share one selection, made by the first of them; 1 in the paper."""
    pooling: Literal["mean", "weighted"] = "mean"
    """The pooling of keys: their mean, or learned weights for each head and place in the block,
    which start as the mean."""
    cmp_rope: Literal["post", "pre"] = "post"
    """The order of pooling and rotation: keys are pooled after rotation (post), or before it, and
    then rotated to the position of their block's first key (pre)."""
    bound: float = Field(0.0, ge=0, le=1)
    """The score of a block: 0, the logit of its pooled key; 1, an upper bound on the logit of any
    of its keys, from the minimum and maximum of every channel (Quest, arXiv 2406.10774), which a
    single needle raises; values between interpolate."""
    backend: BackendName = "auto"
    """The implementation; auto: on CUDA `gather` if fewer than 128 queries share a selection, else
    `flex`, or by lengths in the table of the device; `reference` if neither supports the sizes."""
    min_len: int = Field(0, ge=0)
    """Shorter sequences use dense attention, which differs beyond `num_selected` blocks."""
    layers: tuple[int, ...] | None = None
    """Decoder layers with sparse attention; all by default."""

    @property
    def tile_blocks(self) -> int:
        """Selection blocks that a tile of queries spans."""
        return max(1, self.select_tile // self.select_block)

    @property
    def num_forced(self) -> int:
        """The most blocks that are read regardless of their scores."""
        return self.init_blocks + self.local_blocks - 1 + self.tile_blocks

    @property
    def selected_keys(self) -> int:
        """The most keys that a query reads by selection (n l')."""
        return self.num_selected * self.select_block

    @property
    def reach(self) -> int:
        """The longest sequence of which every key is selected: up to it attention is dense.

        It consists of whole tiles of queries: all blocks of the last one count as selected.
        """
        return self.selected_keys - self.selected_keys % max(self.select_block, self.select_tile)

    def num_compressed(self, length: int) -> int:
        """Return the number of pooled keys for `length` keys."""
        return max(0, (length - self.compress_block) // self.compress_stride + 1)

    def num_blocks(self, length: int) -> int:
        """Return the number of selection blocks for `length` keys; the last ones may be partial.

        The last tile's blocks are all counted, so that its selection does not depend on the length.
        """
        return -(-length // max(self.select_block, self.select_tile)) * self.tile_blocks

    def num_tiles(self, length: int) -> int:
        """Return the number of tiles for `length` queries; the last one may be partial."""
        return -(-length // self.select_tile)

    @model_validator(mode="after")
    def _check(self) -> Self:
        _divides("compress_stride", self.compress_stride, "compress_block", self.compress_block)
        _divides("compress_stride", self.compress_stride, "select_block", self.select_block)
        if self.compress_block > self.select_block:
            raise ValueError(
                f"compress_block={self.compress_block} is more than select_block="
                f"{self.select_block}; lower the former or raise the latter"
            )
        small, large = sorted((self.select_tile, self.select_block))
        if large % small:
            raise ValueError(
                f"select_tile={self.select_tile} and select_block={self.select_block} do not "
                "divide one another; make one a multiple of the other"
            )
        if self.num_selected < self.num_forced:
            raise ValueError(
                f"num_selected={self.num_selected}, but {self.num_forced} blocks are forced (first,"
                " local and those of the tile); raise num_selected"
            )
        if self.mode == "merged" and self.pooling == "weighted":
            raise ValueError(
                "pooling=weighted learns, but merged branches have no parameters; use pooling=mean "
                "or another mode"
            )
        return self


def _divides(small: str, value: int, large: str, whole: int) -> None:
    if whole % value:
        raise ValueError(
            f"{small}={value} does not divide {large}={whole}; make {large} a multiple of {small}"
        )


EACH = {"select_tile": 1, "compress_stride": 32, "bound": 0.3}
"""Settings for a selection by each query, by bounds of adjacent blocks, which finds a needle."""
MERGED = {"mode": "merged", "num_selected": 18, "local_blocks": 5}
PRESETS = {
    "nsa": NSAConfig(**EACH),
    "nsa-merged": NSAConfig(**MERGED, **EACH),
    "nsa-shared": NSAConfig(),
    "nsa-merged-shared": NSAConfig(**MERGED),
    "nsa-paper": NSAConfig(mode="sigmoid", select_block=64, select_tile=1),
}
"""Definitions by their names in `qat convert --attention`."""
