"""Fine-tunes a checkpoint of train_imagenet.py for other classes at another image size, with layer-wise learning rates.

    accelerate launch train_imagenet.py                    # the demo: a model of ten digits at 16 x 16 pixels
    python examples/finetune.py runs/NAME/best.pt          # becomes one of odd and even at 32 x 40

The new task has 60 labelled pictures. timm fits the weights to it: position embedding and patch projection are
resampled, the head is new.
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2

import vision_longhorn  # noqa: F401, registers the models
from vision_longhorn.checkpoint import load_checkpoint, stated_model

SIZE, PATCH = (32, 40), 8


def odd_or_even():
    """Puts each digit somewhere into a wider picture. Returns images (1797, 3, *SIZE), normalised as in the demo's
    training, and labels (1797,), 1 where the digit is odd."""
    digits = load_digits()
    pictures = F.interpolate(torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], 32, mode="bicubic")
    images = torch.zeros(len(pictures), 1, *SIZE)
    for image, picture in zip(images, pictures.clamp(0, 1)):
        left = int(torch.randint(SIZE[1] - 31, ()))
        image[..., left : left + 32] = picture
    return (images.expand(-1, 3, -1, -1) - 0.3) / 0.4, torch.tensor(digits.target % 2)


def load(path):
    """Loads the checkpoint at `path`, with averaged weights if it has any, for two classes and images of SIZE."""
    checkpoint = load_checkpoint(path)
    name, arguments = stated_model(checkpoint)
    return timm.create_model(
        name,
        pretrained=True,
        pretrained_cfg_overlay=dict(file=path, num_classes=checkpoint["num_classes"]),
        **{**arguments, "num_classes": 2, "img_size": SIZE, "patch_size": PATCH},
    )


def finetune(model, images, labels, epochs=10, lr=1e-3, layer_decay=0.7, batch_size=20):
    """Trains `model`; each block learns at `layer_decay` times the rate of the next one, the head at `lr`."""
    optimizer = create_optimizer_v2(model, "adamw", lr=lr, weight_decay=0.05, layer_decay=layer_decay)
    schedule, _ = create_scheduler_v2(optimizer, "cosine", num_epochs=epochs, warmup_epochs=1)
    model.train()
    for epoch in range(epochs):
        schedule.step(epoch)  # timm's schedules scale the rate of each group by its layer
        for chosen in torch.randperm(len(images)).split(batch_size):
            loss = F.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model, images, labels):
    """Returns the percentage of the images that `model` puts into their class."""
    model.eval()
    right = sum((model(part).argmax(1) == target).sum() for part, target in zip(images.split(256), labels.split(256)))
    return 100 * float(right) / len(images)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="runs/NAME/best.pt of the demo")
    parser.add_argument("--labelled", type=int, default=60, help="pictures to learn from [60]")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    images, labels = odd_or_even()
    seen, rest = slice(args.labelled), slice(args.labelled, None)
    model = load(args.checkpoint)
    finetune(model, images[seen], labels[seen])
    tuned = accuracy(model, images[rest], labels[rest])
    print(f"top-1 {tuned:.1f} % of {len(labels[rest])} other pictures, after fine-tuning on {args.labelled}")
    return tuned


if __name__ == "__main__":
    main()
