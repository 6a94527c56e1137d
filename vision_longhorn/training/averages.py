"""Averaged weights (EMA): timm's, whose tensors are looked up once and not at every update."""

from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import nn

from vision_longhorn.training.fsdp import is_sharded


class Ema(ModelEmaV3):
    """timm's `ModelEmaV3` of a model on the same device, to the same bits.

    timm makes two state dicts at each update, for which the GPU has to wait if the model is small. This class keeps the
    tensors of the first update, so model and average must not be cast or loaded with `assign=True` afterwards. Shards
    are looked up each time, as FSDP may move them.
    """

    _found: tuple[list[torch.Tensor], list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": None}  # a copy has tensors of its own

    def apply_update_(self, model: nn.Module, decay: float) -> None:
        """
        Args:
            model: The model, always the same one.
            decay: Share of the average that stays.
        """
        if is_sharded(model):
            super().apply_update_(model, decay)
            return
        if self._found is None:
            pairs = list(zip(self.module.state_dict().values(), model.state_dict().values(), strict=True))
            floats = [pair for pair in pairs if pair[0].is_floating_point()]
            whole = [pair for pair in pairs if not pair[0].is_floating_point()]
            self._found = [average for average, _ in floats], [value for _, value in floats], whole
        averages, values, whole = self._found
        torch._foreach_lerp_(averages, values, weight=1.0 - decay)
        for average, value in whole:
            average.copy_(value)
