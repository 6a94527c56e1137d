"""Evaluates a checkpoint, or any timm model, on image shards: top-1, top-5, loss and count, printed and saved as JSON.

    accelerate launch eval.py runs/NAME
    accelerate launch eval.py --model resnet50 --pretrained --data DIR --split val

Any number of processes gives the same counts. A checkpoint of a training run brings its model, classes, data, input
size, normalisation and crop.
"""

OWN_COMMAND = True  # vision_longhorn imports its models only when the command line has been read

from vision_longhorn.command_line.commands import run  # noqa: E402
from vision_longhorn.eval import main  # noqa: E402, F401

if __name__ == "__main__":
    run("eval")
