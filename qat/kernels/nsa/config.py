"""Native Sparse Attention (arXiv 2502.11089) in numbers: one definition for all backends."""

from typing import Literal, Self

from pydantic import Field, model_validator

from qat.config import Settings

Mode = Literal["residual", "sigmoid", "merged"]
BackendName = Literal["auto", "reference", "flex", "gather", "fla"]


class NSAConfig(Settings):
    """Sizes count positions unless they say otherwise."""

    mode: Mode = "residual"
    """How branches become one: `residual` and `sigmoid` gate three of them, the former starting as
    selection alone; `merged` is one softmax over first, local and selected blocks, without
    parameters (arXiv 2509.24663)."""
    compress_block: int = Field(32, ge=1)
    """Keys that are pooled into one (the paper's l)."""
    compress_stride: int = Field(16, ge=1)
    """Distance of pooled keys (d); divides both kinds of block."""
    select_block: int = Field(128, ge=1)
    """Keys that are chosen together (l')."""
    num_selected: int = Field(16, ge=1)
    """Blocks that a query reads by choice, the forced ones included (n)."""
    window: int = Field(512, ge=1)
    """Last keys that a query reads in any case, its own included (w); `merged` has no window."""
    init_blocks: int = Field(1, ge=0)
    """Forced blocks at the beginning of the document."""
    local_blocks: int = Field(2, ge=1)
    """Forced blocks up to and including the query's own."""
    select_tile: int = Field(128, ge=1)
    """Queries that share one choice, made by the first of them; 1 is the paper's."""
    pooling: Literal["mean", "weighted"] = "mean"
    """How keys become one: their mean, or by learned weights for each head and place in the block,
    which begin as the mean."""
    cmp_rope: Literal["post", "pre"] = "post"
    """Whether pooled keys were rotated before they were pooled (post), or are rotated afterwards,
    to the position of their block's first key (pre)."""
    bound: float = Field(0.0, ge=0, le=1)
    """What a block is judged by: 0, the logit of its pooled key; 1, the highest logit that any key
    between the least and the greatest of it in every channel could have (Quest, arXiv 2406.10774),
    which a single needle raises; between them, so far on the way."""
    backend: BackendName = "auto"
    """Which code computes it; auto: on CUDA `gather` where fewer than 128 queries share a choice,
    `flex` where more do, as far as the sizes allow it; else `reference`."""
    min_len: int = Field(0, ge=0)
    """Shorter sequences attend densely, which is another function beyond `num_selected` blocks."""
    layers: tuple[int, ...] | None = None
    """Which decoder layers; all by default."""

    @property
    def tile_blocks(self) -> int:
        """Selection blocks that a tile of queries lies in."""
        return max(1, self.select_tile // self.select_block)

    @property
    def num_forced(self) -> int:
        """Most blocks that are read whatever their scores."""
        return self.init_blocks + self.local_blocks - 1 + self.tile_blocks

    @property
    def selected_keys(self) -> int:
        """Most keys that a query reads by choice (n l')."""
        return self.num_selected * self.select_block

    @property
    def reach(self) -> int:
        """Longest sequence whose every key is selected: attention is dense up to there.

        Whole tiles of queries: the last one's blocks all count among those that it chooses.
        """
        return self.selected_keys - self.selected_keys % max(self.select_block, self.select_tile)

    def num_compressed(self, length: int) -> int:
        """Pooled keys of `length` keys."""
        return max(0, (length - self.compress_block) // self.compress_stride + 1)

    def num_blocks(self, length: int) -> int:
        """Selection blocks of `length` keys, the last ones perhaps not full.

        Those of the last tile are counted whole, so that its choice does not depend on the length.
        """
        return -(-length // max(self.select_block, self.select_tile)) * self.tile_blocks

    def num_tiles(self, length: int) -> int:
        """Tiles of `length` queries, the last one perhaps not full."""
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
"""A choice for each query, by bounds of blocks side by side: what finds a needle."""
MERGED = {"mode": "merged", "num_selected": 18, "local_blocks": 5}
PRESETS = {
    "nsa": NSAConfig(**EACH),
    "nsa-merged": NSAConfig(**MERGED, **EACH),
    "nsa-shared": NSAConfig(),
    "nsa-merged-shared": NSAConfig(**MERGED),
    "nsa-paper": NSAConfig(mode="sigmoid", select_block=64, select_tile=1),
}
"""By what `qat convert --attention` calls them."""
