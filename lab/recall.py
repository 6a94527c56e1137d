"""A run of multi-query associative recall: the process that a study starts for it.

python -m lab.recall --config FILE --run-dir DIR

Its folder holds what a trainer's does, where "top1" is the share of queries that are answered and "images_per_s" counts
sequences. The same command goes on from the last checkpoint.
"""

import contextlib
import signal
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

from lab.mqar import RecallModel, Sequences, draw_sequences
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
from vision_longhorn.training.step import step_if_finite


def main(argv: Sequence[str] | None = None) -> None:
    """Trains as the command line `argv` says (default: the process's own)."""
    parser = Parser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--config", required=True, help="YAML file of settings")
    parser.add_argument("--run-dir", required=True, help="folder of the run")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"), help="[cuda if there is one]")
    args = parser.parse_args(argv)
    with bad_input(args.config):  # a key that is none
        cfg = RecallConfig(**read_yaml(Path(args.config)))
    with contextlib.ExitStack() as held:
        RecallRun(cfg, Path(args.run_dir), args.device, held).train()


def build_model(cfg: RecallConfig) -> RecallModel:
    """The model of a run, on the CPU. Raises UserError where the mixer refuses its options."""
    with bad_input(f"mixer={cfg.mixer} with model_kwargs={cfg.model_kwargs}"):
        check_values(cfg.model_kwargs)
        return RecallModel(cfg.vocab_size, cfg.length, cfg.width, cfg.depth, cfg.mixer, **cfg.model_kwargs)


def mean_loss(scores: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, () float32, of scores (B x K, vocab_size) for answers (B, K)."""
    return F.cross_entropy(scores.float(), answers.long().flatten())


class RecallRun:
    """A run, from its set-up to its end.

    Args:
        cfg: The `RecallConfig`.
        path: Folder of the run, which goes on where it holds a checkpoint.
        device: "auto", "cuda" or "cpu".
        held: Closes what the run holds open, and lets others have its folder.
    """

    def __init__(self, cfg: RecallConfig, path: Path, device: str, held: contextlib.ExitStack) -> None:
        self.cfg, last = cfg, Run(path).last
        cfg.resume = str(last)  # also where a kill came before the first one had this name: then the run begins anew
        # fp16, which older GPUs would get, would need its loss scaled.
        plain = cfg.precision == "auto" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(False)
        self.accelerator = make_accelerator(device, "fp32" if plain else cfg.precision)
        self.device = self.accelerator.device
        self.folder = RunFolder(path, cfg, self.accelerator, held)
        set_seed(cfg.seed)
        self.model = build_model(cfg).to(self.device)
        self.optimizer = create_optimizer_v2(self.model, "adamw", lr=cfg.lr, weight_decay=cfg.weight_decay, fused=True)
        self.scheduler = CosineLRScheduler(self.optimizer, t_initial=cfg.epochs)
        shape = (cfg.length, cfg.pairs, cfg.vocab_size, cfg.power)
        self.data, self.val = (
            draw_sequences(count, *shape, seed=2 * cfg.seed + split, device=self.device)
            for split, count in enumerate((cfg.train_samples, cfg.val_samples))
        )
        self.updates_per_epoch = cfg.train_samples // cfg.batch_size
        self.updates, self.history = 0, list[dict[str, Any]]()
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)  # of this epoch's updates
        self.skipped = torch.zeros((), dtype=torch.int64, device=self.device)  # of all
        self.skipped_before = 0
        self.index = torch.zeros(cfg.batch_size, dtype=torch.int64, device=self.device)  # of this update's samples
        self.grad_norm = torch.zeros((), device=self.device)
        on_gpu = self.device.type == "cuda"
        self.training_loss = torch.compile(mean_loss) if on_gpu and cfg.compile else mean_loss
        if self.folder.checkpoint:
            self.resume(load_checkpoint(last))
        self.graph = self.capture() if on_gpu and cfg.cuda_graphs else None

    def resume(self, checkpoint: dict[str, Any]) -> None:
        """Goes on where the checkpoint stopped."""
        load_weights(self.model, checkpoint, str(self.cfg.resume))
        if "optimizer" in checkpoint:
            self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.updates, self.history = checkpoint["updates"], checkpoint["history"]
        self.loss_sum.fill_(checkpoint["loss_sum"])
        self.skipped.fill_(checkpoint["skipped"])
        self.skipped_before = checkpoint["skipped_before"]
        print(f"Going on with {self.cfg.resume} after update {self.updates}.")

    def train(self) -> None:
        """Trains to the end, or to a signal."""
        facts = {"updates_per_epoch": self.updates_per_epoch, "global_batch": self.cfg.batch_size}
        self.folder.open(facts, "", self.updates)
        with StopSignals(self.folder.path) as signals:
            while not self.cfg.is_over(self.history):
                self.train_epoch(signals)
                self.save()
                self.folder.write_history(self.history)
        self.folder.write_history(self.history)  # of a run that was killed before it could
        if self.folder.log:
            best = max(entry["val"]["top1"] for entry in self.history)
            self.folder.log.finish(self.cfg, best)

    def train_epoch(self, signals: StopSignals) -> None:
        """The updates of an epoch that are left, and its evaluation; where a signal comes, the process ends."""
        epoch, cfg = len(self.history), self.cfg
        first, end = self.updates, (epoch + 1) * self.updates_per_epoch
        order = torch.from_numpy(np.random.default_rng([cfg.seed, epoch]).permutation(cfg.train_samples))
        batches = order.to(self.device).split(cfg.batch_size)
        self.scheduler.step(epoch)
        self.model.train()
        start = time.perf_counter()
        while self.updates < end:
            if signals.received:
                self.stop(signals.received)
            self.train_step(batches[self.updates % self.updates_per_epoch])
        loss_sum, skipped = self.loss_sum.item(), int(self.skipped)  # which waits for the device
        rate = (end - first) * cfg.batch_size / (time.perf_counter() - start)
        made = self.updates_per_epoch - (skipped - self.skipped_before)
        if not made:
            raise UserError(
                f"all updates of epoch {epoch + 1} were skipped, as loss or gradients were not finite: give a lower lr "
                f"than {cfg.lr}"
            )
        self.loss_sum.zero_()
        self.skipped_before = skipped
        facts = {"train_loss": loss_sum / made, "lr": self.optimizer.param_groups[0]["lr"], "images_per_s": rate}
        self.history.append({"epoch": epoch + 1, **facts, "val": self.evaluate()})
        self.report()

    def train_step(self, index: torch.Tensor) -> None:
        """One update, by the samples of these numbers, (batch_size,) int64."""
        self.index.copy_(index)
        if self.graph:
            self.graph.replay()
        else:
            self.passes()
        step_if_finite(self.optimizer, self.grad_norm)
        self.updates += 1

    def passes(self) -> None:
        """The gradients of the samples of `index`, their norm, and the sums of an epoch."""
        self.optimizer.zero_grad()
        loss, _ = self.loss(Sequences(*(part[self.index] for part in self.data)))
        loss.backward()
        grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.grad_norm = torch.nn.utils.get_total_norm(grads)
        is_good = self.grad_norm.isfinite()
        self.loss_sum += torch.where(is_good, loss.detach(), 0)
        self.skipped += ~is_good

    def capture(self) -> torch.cuda.CUDAGraph:
        """`passes` as one launch: these models are so small that the GPU would wait for the CPU."""
        sums = self.loss_sum.clone(), self.skipped.clone()
        self.model.train()
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(3):  # what is compiled or chosen at first sight is, and what is allocated once
                self.passes()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.passes()
        self.loss_sum.copy_(sums[0])
        self.skipped.copy_(sums[1])
        return graph

    def loss(self, batch: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean cross-entropy of a batch's answers, and their scores (answers, vocab_size)."""
        with self.accelerator.autocast():
            scores = self.model(batch.tokens, batch.places).flatten(0, 1)
        return (self.training_loss if self.model.training else mean_loss)(scores, batch.answers), scores

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Dict of "top1", the share of the evaluation's queries that are answered in per cent, and "loss"."""
        self.model.eval()
        right = torch.zeros((), dtype=torch.int64, device=self.device)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for parts in zip(*(part.split(self.cfg.batch_size) for part in self.val)):
            batch = Sequences(*parts)
            loss, scores = self.loss(batch)
            loss_sum += loss.double() * len(batch.tokens)
            right += (scores.argmax(-1) == batch.answers.flatten()).sum()
        return {"top1": 100 * right.item() / self.val.answers.numel(), "loss": loss_sum.item() / len(self.val.tokens)}

    def report(self) -> None:
        """Says how the last epoch went, and adds it to the curves."""
        entry = self.history[-1]
        print(
            f"epoch {entry['epoch']:3d}  loss {entry['train_loss']:.4f}  {entry['images_per_s']:,.0f} sequences/s  "
            f"accuracy {entry['val']['top1']:.2f} %"
        )
        if self.folder.log:
            curves = {f"train/{key}": entry[key] for key in ("lr", "images_per_s", "epoch")}
            curves |= {"train/loss": entry["train_loss"], "train/skipped": self.skipped_before}
            self.folder.log.add(curves, self.updates)
            self.folder.log.add_results({"val": entry["val"]}, self.updates)

    def save(self) -> None:
        """Saves a checkpoint; that of a run which is over has no moments, two thirds of its size."""
        state = dict(
            epoch=len(self.history),
            updates=self.updates,
            history=self.history,
            config=self.cfg.values(),
            state_dict=self.model.state_dict(),
            loss_sum=self.loss_sum.item(),
            skipped=int(self.skipped),
            skipped_before=self.skipped_before,
        )
        if not self.cfg.is_over(self.history):
            state["optimizer"] = self.optimizer.state_dict()
        self.folder.save(state, is_best=False)

    def stop(self, number: int) -> None:
        """Saves, and ends the process by the code that a shell gives to one ended by the signal that came."""
        self.save()
        print(f"Stopped by {signal.Signals(number).name} after update {self.updates}; the same command goes on.")
        sys.exit(128 + number)


if __name__ == "__main__":
    run_cli(main)
