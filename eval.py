"""Evaluates a checkpoint, or any timm model, on image shards: top-1, top-5, loss and count, printed and saved as JSON.

    accelerate launch eval.py --checkpoint runs/NAME
    accelerate launch eval.py --model resnet50 --pretrained --data DIR --split val

Any number of processes gives the same counts. A checkpoint of a training run brings its model, classes, data, input
size, normalisation and crop.
"""

from vision_longhorn.errors import run_cli
from vision_longhorn.eval_command import main

if __name__ == "__main__":
    run_cli(main)
