"""Multi-query associative recall (MQAR, arXiv 2312.04927): its sequences, and a small language model to learn them.

A sequence gives pairs of key and value, then asks for each of them once:

    key value key value ... | 0 key 0 0 0 key ...

At each later key the model has to predict the value that came with the key.
"""

import inspect
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vision_longhorn.kernels.contract import check_option

from vision_longhorn.models.mixers import MIXERS
from vision_longhorn.models.vlonghorn import Block

ROWS = 4096  # sequences drawn at once; each takes a float for every word of the vocabulary


class Sequences(NamedTuple):
    """Sequences of L tokens with K queries each. Queries are in the order of their pairs; all is int32."""

    tokens: Tensor  # (count, L)
    places: Tensor  # (count, K), the queries' positions
    answers: Tensor  # (count, K), the values that they ask for


def draw_sequences(
    count: int, length: int, pairs: int, vocab_size: int, power: float, seed: int, device: Any = "cpu"
) -> Sequences:
    """Draws sequences as in arXiv 2312.04927. The same seed gives the same ones on the same kind of device.

    Keys (1 to vocab_size / 2 - 1) and values (from there on) each differ within a sequence. A query stands on one of
    every two tokens behind the pairs; the i-th of these places, from 1, is drawn with weight i^(power - 1), without
    repetition. All other tokens are 0. `length` is even, 4 x `pairs` or more, and `vocab_size` even, above 2 x `pairs`.
    """
    draw = torch.Generator(device).manual_seed(seed)
    words = torch.ones(vocab_size // 2, device=device)
    steps = torch.arange(1, length // 2 - pairs + 1, device=device)
    weights = steps.double().pow(power - 1).float()
    parts = []
    for start in range(0, count, ROWS):
        rows = min(ROWS, count - start)
        keys, values, gaps = (
            torch.multinomial(weight.expand(rows, -1), pairs, generator=draw)  # (rows, K), without repetition
            for weight in (words[1:], words, weights)
        )
        keys, values = keys + 1, values + vocab_size // 2
        tokens = torch.zeros(rows, length, dtype=torch.int64, device=device)
        tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values
        places = 2 * (pairs + gaps)
        parts.append([part.int() for part in (tokens.scatter(1, places, keys), places, values)])
    return Sequences(*map(torch.cat, zip(*parts)))


class RecallModel(nn.Module):
    """Embedding, blocks that look back only, norm, and the embedding again as the head.

    As in arXiv 2312.04927, the head is tied, and attention, which has no order of its own, gets a learned position
    embedding. Unlike there, all mixers have the same blocks, with an RMS norm and without dropout, and attention has
    one head for each 64 channels instead of one in all. `mixer` names one of `vision_longhorn.models.mixers`, which
    takes `mixer_args`.
    """

    def __init__(self, vocab_size: int, length: int, width: int, depth: int, mixer: str, **mixer_args: Any) -> None:
        super().__init__()
        check_option("mixer", mixer, tuple(MIXERS))
        is_attention = "causal" in inspect.signature(MIXERS[mixer]).parameters
        forward: dict[str, Any] = {"causal": True} if is_attention else {"wiring": "forward"}
        self.embed = nn.Embedding(vocab_size, width)
        self.pos_embed = nn.Parameter(torch.empty(length, width)) if is_attention else None
        self.blocks = nn.Sequential(
            *[Block(width, mixer=mixer, index=i, residual_layers=depth, **forward, **mixer_args) for i in range(depth)]
        )
        self.norm = nn.RMSNorm(width, eps=1e-5)
        for weight in (self.embed.weight, self.pos_embed):
            if weight is not None:
                nn.init.normal_(weight, std=0.02)

    def no_weight_decay(self) -> set[str]:
        """Names, with wildcards, what timm's optimisers must not decay (they spare 1-D parameters by themselves)."""
        names = {name for module in self.blocks.modules() for name in getattr(module, "NO_WEIGHT_DECAY", ())}
        return {f"*.mixer.{name}" for name in names}

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Maps tokens (B, L) to scores (B, K, vocab_size) at the `places` (B, K) of the queries. At all tokens the head
        would take most of the arithmetic."""
        x = self.embed(tokens)  # (B, L, width)
        if self.pos_embed is not None:
            x = x + self.pos_embed
        x = self.blocks(x)
        x = x.gather(1, places.long().unsqueeze(-1).expand(-1, -1, x.shape[-1]))  # (B, K, width)
        return F.linear(self.norm(x), self.embed.weight)
