"""Segmentation with a Vision Longhorn as the backbone: to which digit, if any, does each pixel of a scene belong?

    python examples/segmentation.py

The scenes are put together from scikit-learn's handwritten digits 0, 1 and 2. timm makes the backbone with
`features_only=True`; the name of a vision transformer in timm would work there, too.
"""

import argparse

import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import vision_longhorn  # noqa: F401, registers the models

SIZE, CLASSES = (16, 40), 4  # background, 0, 1, 2


class Segmenter(nn.Module):
    """The maps of several blocks side by side, normalised, projected to classes and brought to the image's size."""

    def __init__(self, backbone, num_classes):
        super().__init__()
        channels = sum(backbone.feature_info.channels())
        self.backbone = backbone
        self.head = nn.Sequential(nn.GroupNorm(1, channels), nn.Conv2d(channels, num_classes, 1))

    def forward(self, images):  # (B, 3, H, W) -> (B, num_classes, H, W)
        maps = torch.cat(self.backbone(images), 1)  # (B, channels, H / 4, W / 4), 4 being feature_info.reduction()
        return F.interpolate(self.head(maps), images.shape[-2:], mode="bilinear")


def make_scenes(count, digits):
    """Makes `count` scenes of three digits: images (count, 3, *SIZE), and the class of each pixel (count, *SIZE)."""
    images, classes = torch.zeros(count, *SIZE), torch.zeros(count, *SIZE, dtype=torch.long)
    for image, target in zip(images, classes):
        for third in range(3):
            i = int(torch.randint(len(digits.images), ()))
            digit = torch.tensor(digits.images[i] / 16, dtype=torch.float32)  # (8, 8)
            top, left = int(torch.randint(9, ())), 13 * third + int(torch.randint(6, ()))
            image[top : top + 8, left : left + 8] = digit
            target[top : top + 8, left : left + 8] = (digit > 0.25) * (1 + int(digits.target[i]))
    return (images[:, None].expand(-1, 3, -1, -1) - 0.3) / 0.4, classes


def mean_iou(predicted, classes):
    """Computes the intersection over union of the pixels, mean over the classes, in per cent."""
    pairs = torch.bincount((CLASSES * classes + predicted).flatten(), minlength=CLASSES**2).view(CLASSES, CLASSES)
    both = pairs.diag()
    return 100 * float((both / (pairs.sum(0) + pairs.sum(1) - both)).mean())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="updates, of 16 scenes each [600]")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    digits = load_digits(n_class=CLASSES - 1)
    images, classes = make_scenes(2000, digits)
    model = Segmenter(
        timm.create_model(
            "vlonghorn_test", features_only=True, out_indices=(0, 1), img_size=SIZE, patch_size=4, depth=2
        ),
        CLASSES,
    )

    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 6e-3, total_steps=args.steps)
    for _ in range(args.steps):
        chosen = torch.randint(1800, (16,))  # the last 200 are held out
        loss = F.cross_entropy(model(images[chosen]), classes[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()

    with torch.no_grad():
        predicted = model.eval()(images[1800:]).argmax(1)
    found, trivial = (mean_iou(guess, classes[1800:]) for guess in (predicted, torch.zeros_like(predicted)))
    print(f"mean IoU {found:.1f} % on 200 held-out scenes of {SIZE[0]} x {SIZE[1]}; background alone {trivial:.1f} %")
    return found, trivial


if __name__ == "__main__":
    main()
