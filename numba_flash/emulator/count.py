"""What a kernel's accesses cost: bytes, sectors, bank conflicts, barriers, multiply-adds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arithmetic import Value
from .lanes import Mask

if TYPE_CHECKING:
    from .memory import Array


class Counts:
    """The counts of one batch of blocks, by line."""

    def access(
        self,
        array: Array,
        base: int,
        offset: Value,
        mask: Mask,
        how: str,
        width: int,
        place: tuple[str, int],
    ) -> None:
        """Count one access of the lanes of ``mask``: one request a warp."""
