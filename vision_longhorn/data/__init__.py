"""Image data in tar shards: where it comes from, finding it, reading it. `vision_longhorn.shards` makes shards."""

from .images import DataError, decode_image
from .index import ShardSet, open_shards
from .loader import eval_loader, train_loader

__all__ = ["DataError", "ShardSet", "decode_image", "eval_loader", "open_shards", "train_loader"]
