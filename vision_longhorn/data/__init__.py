"""Image data in tar shards: making, finding, reading."""

from .images import DataError, decode_image
from .index import ShardSet, open_shards
from .loader import eval_loader, train_loader
from .sources import make_digits

__all__ = ["DataError", "ShardSet", "decode_image", "eval_loader", "make_digits", "open_shards", "train_loader"]
