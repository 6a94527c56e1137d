"""Memory that a loader's worker shares with the process it works for, and uses again."""

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

PREFETCH = 2  # batches for which torch asks a worker before it has taken the first
_SPARE = 1.25  # bytes of new memory for each byte of the batch that needs it, since batches differ in size


class SharedMemory:
    """Gives memory for batches. To use new memory for the first time takes longer than to fill it, so a worker whose
    batches are pinned keeps two pieces and gives them in turn.

    torch asks a worker for batch n only after its batch n - 2 was taken, and has copied that to pinned memory before.
    What is not pinned may still be in use then, and gets new memory. So do all batches of an evaluation: when a worker
    has no more, torch asks another one earlier. In an epoch of training no batch is left to ask for then.

    Args:
        is_pinned: whether torch copies each batch to pinned memory, and no worker ends before another.
    """

    def __init__(self, is_pinned: bool) -> None:
        self.is_pinned = is_pinned
        self.pieces = [torch.empty(0, dtype=torch.uint8)] * PREFETCH

    def __call__(self, size: int) -> Tensor:
        """Return memory for `size` bytes, uint8 (size,), with any content."""
        if get_worker_info() is None:
            return torch.empty(size, dtype=torch.uint8)
        if not self.is_pinned:
            return _shared(size)
        piece, *others = self.pieces
        if len(piece) < size:
            piece = _shared(int(size * _SPARE))
        self.pieces = [*others, piece]
        return piece[:size]


def _shared(size: int) -> Tensor:
    # As torch's own collation does. What lies elsewhere would be copied to such memory.
    return torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage._new_shared(size))
