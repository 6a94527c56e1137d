"""Trains a model on multi-query associative recall. A study starts this process.

python -m lab.recall --config FILE --run-dir DIR

Its folder is like the trainer's. There "top1" is the share of queries that are answered correctly, and "images_per_s"
counts sequences. The same command goes on from the last epoch.
"""

import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from torch import Tensor

from lab.mqar import RecallModel, draw_sequences
from lab.recall_config import RecallConfig
from vision_longhorn.checkpoint import load_checkpoint, load_weights
from vision_longhorn.command_line.parser import Parser, run_cli
from vision_longhorn.devices import make_accelerator
from vision_longhorn.errors import UserError, bad_input
from vision_longhorn.model_arguments import check_values
from vision_longhorn.runs import Run
from vision_longhorn.settings import read_yaml
from vision_longhorn.signals import StopSignals
from vision_longhorn.training.folder import RunFolder
from vision_longhorn.training.step import TrainStep


def main(argv: Sequence[str] | None = None) -> None:
    """Trains as the command line `argv` says (default: the process's own)."""
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--config", required=True, help="YAML file of settings")
    parser.add_argument("--run-dir", required=True, help="folder of the run")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"), help="[cuda if there is one]")
    args = parser.parse_args(argv)
    with bad_input(args.config):  # an unknown key
        cfg = RecallConfig(**read_yaml(Path(args.config)))
    with contextlib.ExitStack() as held:
        RecallRun(cfg, Path(args.run_dir), args.device, held).train()


def build_model(cfg: RecallConfig) -> RecallModel:
    """Builds the model of a run on the CPU. Raises UserError if the mixer refuses its options."""
    with bad_input(f"mixer={cfg.mixer} with model_kwargs={cfg.model_kwargs}"):
        check_values(cfg.model_kwargs)
        return RecallModel(cfg.vocab_size, cfg.length, cfg.width, cfg.depth, cfg.mixer, **cfg.model_kwargs)


def mean_loss(scores: Tensor, answers: Tensor) -> Tensor:
    """Computes the mean cross-entropy, () float32, of scores (B, K, vocab_size) for answers (B, K)."""
    return F.cross_entropy(scores.flatten(0, 1).float(), answers.long().flatten())


class RecallRun:
    """A run in the folder `path`. It goes on from a checkpoint if there is one. `held` closes what the run opens."""

    def __init__(self, cfg: RecallConfig, path: Path, device: str, held: contextlib.ExitStack) -> None:
        self.cfg, last = cfg, Run(path).last
        cfg.resume = str(last)  # if a kill came before the first one was written, the run begins anew
        # Older GPUs would get fp16, which needs its loss scaled.
        plain = cfg.precision == "auto" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(False)
        self.accelerator = make_accelerator(device, "fp32" if plain else cfg.precision)
        self.device, on_gpu = self.accelerator.device, self.accelerator.device.type == "cuda"
        self.folder = RunFolder(path, cfg, self.accelerator, held)
        set_seed(cfg.seed)
        self.model = build_model(cfg).to(self.device)
        optimizer = create_optimizer_v2(self.model, "adamw", lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
        self.scheduler = CosineLRScheduler(optimizer, t_initial=cfg.epochs)
        criterion = torch.compile(mean_loss) if on_gpu and cfg.compile else mean_loss
        self.step = TrainStep(self.accelerator, self.model, self.scores, criterion, optimizer)
        shape = (cfg.length, cfg.pairs, cfg.vocab_size, cfg.power)
        self.data, self.val = (
            draw_sequences(count, *shape, seed=2 * cfg.seed + split, device=self.device)
            for split, count in enumerate((cfg.train_samples, cfg.val_samples))
        )
        self.updates_per_epoch, self.history = cfg.train_samples // cfg.batch_size, list[dict[str, Any]]()
        self.index = torch.zeros(cfg.batch_size, dtype=torch.int64, device=self.device)  # of this update's samples
        self.skipped = 0
        if self.folder.checkpoint:
            checkpoint = load_checkpoint(last)
            load_weights(self.model, checkpoint, str(last))
            if "optimizer" in checkpoint:
                optimizer.load_state_dict(checkpoint["optimizer"])
            self.history, self.skipped = checkpoint["history"], checkpoint["skipped"]
            if self.updates != checkpoint["updates"]:  # older versions also saved within an epoch
                raise UserError(f"{last} was saved within an epoch: remove {path}, and the run begins anew")
        self.graph = self.capture() if on_gpu and cfg.cuda_graphs else None

    @property
    def updates(self) -> int:
        """The number of updates up to the last epoch."""
        return len(self.history) * self.updates_per_epoch

    def scores(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Computes scores (B, K, vocab_size) at the places (B, K) of tokens (B, L)."""
        with self.accelerator.autocast():
            return self.model(*batch)

    def train(self) -> None:
        """Trains to the end, or until a signal comes. A signal discards what the epoch has done so far."""
        self.folder.open({"updates_per_epoch": self.updates_per_epoch, "global_batch": self.cfg.batch_size}, "",
                         self.updates)  # fmt: skip
        with StopSignals() as signals:
            while not self.cfg.is_over(self.history):
                self.train_epoch(signals)
                self.save()
                self.folder.write_history(self.history)
        self.folder.write_history(self.history)  # a kill may have come before this
        self.folder.finish(max(entry["val"]["top1"] for entry in self.history))

    def train_epoch(self, signals: StopSignals) -> None:
        """Makes the updates of an epoch, evaluates, and reports both."""
        epoch, cfg = len(self.history), self.cfg
        order = torch.from_numpy(np.random.default_rng([cfg.seed, epoch]).permutation(cfg.train_samples))
        batches = order.to(self.device).split(cfg.batch_size)[: self.updates_per_epoch]
        self.scheduler.step(epoch)
        self.model.train()
        start, loss_sum = time.perf_counter(), torch.zeros((), dtype=torch.float64, device=self.device)
        made = torch.zeros((), dtype=torch.int64, device=self.device)
        for index in batches:
            if signals.received:
                sys.exit(128 + signals.received)
            loss, norm = self.update(index)
            loss_sum += torch.where(norm.isfinite(), loss, 0)
            made += norm.isfinite()
        count = int(made)  # this waits for the device
        rate = len(batches) * cfg.batch_size / (time.perf_counter() - start)
        if not count:
            raise UserError(
                f"all updates of epoch {epoch + 1} were skipped, as loss or gradients were not finite: give a lower lr "
                f"than {cfg.lr}"
            )
        self.skipped += len(batches) - count
        facts = {"train_loss": loss_sum.item() / count, "lr": self.scheduler.optimizer.param_groups[0]["lr"]}
        self.history.append({"epoch": epoch + 1, **facts, "images_per_s": rate, "val": self.evaluate()})
        entry = self.history[-1]
        print(
            f"epoch {epoch + 1:3d}  loss {entry['train_loss']:.4f}  {rate:,.0f} sequences/s  "
            f"accuracy {entry['val']['top1']:.2f} %"
        )
        curves = {f"train/{key}": entry[key] for key in ("lr", "images_per_s", "epoch")}
        curves |= {"train/loss": entry["train_loss"], "train/skipped": self.skipped}
        self.folder.add(curves, self.updates)
        self.folder.add_results({"val": entry["val"]}, self.updates)

    def update(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Makes an update by the samples numbered `index`, (batch_size,) int64; returns loss and gradient norm."""
        self.index.copy_(index)
        if self.graph:
            self.graph.replay()
        else:
            self.captured = self.passes()
        self.step.apply(self.captured[1])
        return self.captured

    def passes(self) -> tuple[Tensor, Tensor]:
        """Computes the gradients for the samples of `index`; returns the loss and the gradients' norm."""
        tokens, places, answers = (part[self.index] for part in self.data)
        return self.step.gradients([((tokens, places), answers)])

    def capture(self) -> torch.cuda.CUDAGraph:
        """Captures `passes` as one launch, because the GPU would wait for the CPU: these models are small."""
        self.model.train()
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(3):  # kernels are compiled and chosen, and memory is allocated
                self.passes()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.captured = self.passes()
        return graph

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Returns "top1", the per cent of the evaluation's queries that are answered correctly, and "loss"."""
        self.model.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for tokens, places, answers in zip(*(part.split(self.cfg.batch_size) for part in self.val)):
            scores = self.scores((tokens, places))
            loss_sum += mean_loss(scores, answers).double() * len(tokens)
            right += (scores.argmax(-1) == answers).sum()
        return {"top1": 100 * right.item() / self.val.answers.numel(), "loss": loss_sum.item() / len(self.val.tokens)}

    def save(self) -> None:
        """Saves a checkpoint. After the end it has no moments, which are two thirds of its size."""
        state = dict(epoch=len(self.history), updates=self.updates, history=self.history, skipped=self.skipped,
                     config=self.cfg.values(), state_dict=self.model.state_dict())  # fmt: skip
        if not self.cfg.is_over(self.history):
            state["optimizer"] = self.step.optimizer.state_dict()
        self.folder.save(state, is_best=False)


if __name__ == "__main__":
    run_cli(main)
