"""Settings of a run of multi-query associative recall (MQAR), the task of "Zoology: Measuring and Improving Recall in
Efficient Language Models" (arXiv 2312.04927). The defaults are those of the paper's figure 2, from the authors' code:
zoology/experiments/paper_configs/iclr24_zoology_figure2/configs.py of github.com/HazyResearch/zoology, and for what
that leaves open zoology/config.py. That code always trains in fp32.
"""

import dataclasses
from typing import Any

from vision_longhorn.errors import UserError
from vision_longhorn.settings import COUNT, POSITIVE, Range, Settings, option


@dataclasses.dataclass
class RecallConfig(Settings):
    """All values of a run. Fixed are AdamW, a cosine to 0 that changes once an epoch, no warm-up and no clipping."""

    mixer: str = option("longhorn", "what mixes the tokens of a block, of vision_longhorn.models.mixers")
    model_kwargs: dict = option({}, "the mixer's options, except those that make it causal: it always is")
    width: int = option(64, "width of the tokens; 64, 128, 256 and 512 in the paper", COUNT)
    depth: int = option(2, "blocks, without MLPs", COUNT)
    vocab_size: int = option(8192, "tokens; the lower half are keys (and 0, which fills), the upper one values", COUNT)
    length: int = option(256, "tokens of a sequence; paper: (64, with 4 pairs), (128, 8), (256, 16), (512, 64)", COUNT)
    pairs: int = option(16, "pairs of key and value in a sequence, each asked for once", COUNT)
    power: float = option(0.01, "exponent of the power law of the queries' distances; 1 is uniform", POSITIVE)
    train_samples: int = option(100_000, "sequences to train on", COUNT)
    val_samples: int = option(3000, "sequences to evaluate on", COUNT)
    lr: float = option(1e-3, "learning rate; in the paper the best of four from 10^-4 to 10^-2", POSITIVE)
    weight_decay: float = option(0.1, "weight decay, except for a mixer's NO_WEIGHT_DECAY", Range(0))
    batch_size: int = option(256, "sequences in an update; in the paper 512 up to length 128, and 128 at 512", COUNT)
    epochs: int = option(64, "passes over the training sequences", COUNT)
    enough: float = option(99.0, "accuracy in per cent above which a run ends", Range(0, 100))
    resume: str | None = option(None, "checkpoint to go on from", role="start")
    seed: int = option(0, "seed of weights, data and order", Range(0, 2**32 - 1, kind=int))
    precision: str = option("auto", "auto is bf16 autocast on a GPU that has it, else fp32", ("auto", "bf16", "fp32"))
    compile: bool = option(True, "on a GPU, torch.compile the loss, whose scores are most of the memory's traffic")
    cuda_graphs: bool = option(True, "on a GPU, launch an update's passes as one CUDA graph", role="speed")

    # Options of the trainer's config that are fixed here
    track = None
    keep_checkpoints = 1
    grad_accum = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        fewest = 2 * self.pairs + 2
        if self.length % 2 or 4 * self.pairs > self.length:  # key and value, then the query and a token after it
            raise UserError(
                f"length is {self.length} with {self.pairs} pairs: give an even one of {4 * self.pairs} or more"
            )
        if self.vocab_size % 2 or self.vocab_size < fewest:  # half of it are keys
            raise UserError(
                f"vocab_size is {self.vocab_size} with {self.pairs} pairs: give an even one of {fewest} or more"
            )
        if self.train_samples < self.batch_size:
            raise UserError(f"batch_size is {self.batch_size}: give at most {self.train_samples}, all sequences")
        for key in {"wiring", "causal"} & self.model_kwargs.keys():
            raise UserError(f"model_kwargs has {key}: leave it out, recall always runs forward")

    def is_over(self, history: list[dict[str, Any]]) -> bool:
        """Tells whether a run with these results of epochs has nothing left to do."""
        return len(history) >= self.epochs or bool(history) and history[-1]["val"]["top1"] > self.enough
