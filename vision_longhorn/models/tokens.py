"""The order of tokens: the patches of an image row by row, and the class token in its place among them."""

from typing import Optional

import torch
from torch import Tensor


def class_index(class_token: str, num_patches: int) -> int:
    """Return the index of the class token among the tokens; the patches from this index on follow it."""
    if class_token == "middle":
        return num_patches // 2
    return 0 if class_token == "first" else num_patches


def split_class(x: Tensor, class_token: str) -> tuple[Optional[Tensor], Tensor]:
    """Split tokens (B, L, C) into the class token (B, 1, C), None if there is none, and the patches (B, H W, C)."""
    if class_token == "none":
        return None, x
    i = class_index(class_token, x.shape[1] - 1)
    return x[:, i : i + 1], torch.cat([x[:, :i], x[:, i + 1 :]], dim=1)


def join_class(token: Optional[Tensor], patches: Tensor, class_token: str) -> Tensor:
    """Undo `split_class`."""
    if token is None:
        return patches
    i = class_index(class_token, patches.shape[1])
    return torch.cat([patches[:, :i], token, patches[:, i:]], dim=1)


def turn_patches(x: Tensor, rows: int, class_token: str) -> Tensor:
    """Reorder tokens (B, L, C) whose patches stand row by row, in `rows` rows, so that they stand column by column.

    A second call, with the number of columns, undoes the first. The class token stays where it is.
    """
    token, patches = split_class(x, class_token)
    B, count, C = patches.shape
    patches = patches.reshape(B, rows, count // rows, C).transpose(1, 2).reshape(B, count, C)
    return join_class(token, patches, class_token)
