"""What a run carries from update to update, in one object that saves and loads itself."""

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vision_longhorn.checkpoint import load_weights
from vision_longhorn.errors import UserError, bad_input
from vision_longhorn.training.averages import Ema
from vision_longhorn.training.config import Config
from vision_longhorn.training.fsdp import load_optimizer_state, whole_optimizer_state, whole_weights
from vision_longhorn.training.updates import UpdateMonitor

SCHEDULE = "warm-up, then a whole cosine"


@dataclass
class RunState:
    """A run's state. The schedule needs none but the number of updates, the data none but the place in the epoch.

    Attributes:
        model: The model, not wrapped for several processes; its shards, where it is shared out.
        ema: Its averaged weights, if there are any.
        optimizer: Its moments and step counts.
        scaler: Of the loss in fp16, else None.
        monitor: What the curves have still to show.
        updates_per_epoch: Updates in an epoch.
        epoch: Finished epochs.
        updates: Finished updates, over all epochs.
        best: The best top-1 so far, in per cent.
        history: The results of each epoch.
        started: When the run first started.
    """

    model: nn.Module
    ema: Ema | None
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler | None
    monitor: UpdateMonitor
    updates_per_epoch: int
    epoch: int = 0
    updates: int = 0
    best: float = -1.0
    history: list[dict[str, Any]] = field(default_factory=list)
    started: str = field(default_factory=lambda: time.strftime("%Y%m%d-%H%M%S"))

    def state_dict(self) -> dict[str, Any]:
        """The state, for a checkpoint. All processes take part, the first one gets whole tensors."""
        state = dict(
            epoch=self.epoch,
            updates=self.updates,
            watch=self.monitor.state_dict(),
            state_dict=whole_weights(self.model),
            optimizer=whole_optimizer_state(self.model, self.optimizer),
            best_metric=self.best,
            history=self.history,
            started=self.started,
            scaler=self.scaler and self.scaler.state_dict(),
        )
        if self.ema:
            state["state_dict_ema"] = whole_weights(self.ema.module)
        return state

    def load_state_dict(self, state: dict[str, Any], cfg: Config) -> None:
        """Goes on where a checkpoint stopped, at the same share of its epoch if that has another number of updates.

        Raises:
            UserError: Where model or optimiser are others than those of `cfg`.
        """
        load_weights(self.model, state, str(cfg.resume))
        if self.ema:
            load_weights(self.ema.module, state, str(cfg.resume), ema=True)
        load_optimizer(self.model, self.optimizer, state, cfg)
        if self.scaler and state.get("scaler"):
            self.scaler.load_state_dict(state["scaler"])
        self.epoch, self.best, self.history = state["epoch"], state["best_metric"], state["history"]
        self.started = state.get("started", self.started)
        self.monitor.load_state_dict(state["watch"])
        before = state["facts"]["updates_per_epoch"]
        done = (state["updates"] - self.epoch * before) * self.updates_per_epoch // before
        self.updates = self.epoch * self.updates_per_epoch + done

    def end_epoch(self, facts: dict[str, Any], results: dict[str, dict[str, float]]) -> bool:
        """Notes that an epoch is finished.

        Args:
            facts: What the history is to say of it.
            results: Of its evaluation, empty if it had none: "val" of the raw weights, "val_ema" of averaged ones.

        Returns:
            Whether its weights, averaged ones where there are any, are the best so far.
        """
        self.epoch += 1
        self.history.append({"epoch": self.epoch, **facts, **results})
        if not results:
            return False
        top1 = results["val_ema" if self.ema else "val"]["top1"]
        is_best, self.best = top1 > self.best, max(top1, self.best)
        return is_best


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: dict[str, Any], cfg: Config) -> None:
    """Loads moments and step counts of a checkpoint; the settings stay those of `cfg`, which may have changed."""
    if checkpoint["config"]["opt"] != cfg.opt:
        raise UserError(f"opt is {cfg.opt!r}, but {cfg.resume} has the moments of {checkpoint['config']['opt']!r}")
    saved = checkpoint["optimizer"]
    # Some of timm's optimisers count their steps among the settings; a new one has no count yet.
    groups = [
        {**group, **own, "params": group["params"]}
        for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=False)
    ]
    with bad_input(f"resuming with weight_decay={cfg.weight_decay}"):  # 0 makes one group of what else is two
        load_optimizer_state(model, optimizer, {"state": saved["state"], "param_groups": groups})


def changes_since(state: dict[str, Any], cfg: Config, facts: dict[str, Any]) -> list[str]:
    """What is other than it was in the run of a checkpoint, as "KEY BEFORE -> NOW"."""
    new = {**cfg.decisive(cfg.values()), **facts}
    # An older checkpoint lacks newer fields, whose defaults are what it had.
    old = {
        "threads": new.get("threads"),
        "schedule": "a cosine that counts the warm-up",
        **cfg.decisive({**Config().values(), **state["config"]}),
        **state["facts"],
    }
    return [f"{key} {old.get(key)} -> {new[key]}" for key in new if old.get(key) != new[key]]
