"""Trains a Vision Longhorn, or any other timm model, on images: ImageNet, CIFAR-10, your own, or the built-in digits.

    accelerate launch train_imagenet.py                                                 # demo: handwritten digits
    accelerate launch train_imagenet.py --config configs/vlonghorn_tiny.yaml --data DIR # ImageNet shards in DIR
    accelerate launch train_imagenet.py --resume runs/NAME                              # go on where it stopped

One process or many, CPU or GPU: `accelerate launch` decides. `--help` lists every value. In vision_longhorn/training/,
config.py defines them, and trainer.py is the loop. The run's folder gets config.yaml, env.json, TensorBoard events,
checkpoints (update-NUMBER.pt, last.pt, best.pt), metrics.json, summary.csv and curves.png.
"""

OWN_COMMAND = True  # vision_longhorn imports its models only when the command line has been read

from vision_longhorn.command_line.commands import run  # noqa: E402
from vision_longhorn.train import main  # noqa: E402, F401

if __name__ == "__main__":
    run("train")
