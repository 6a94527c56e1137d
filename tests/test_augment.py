"""Augmentation in two halves: the same operations, the same draws and the same pixels as timm's one transform."""

import copy
import io
import random
import statistics

import numpy as np
import pytest
import torch
from PIL import Image
from test_images import encode, gray_profile, rotated, scene, swapped_profile
from test_shards import write_tar
from timm.data import create_transform
from timm.data.auto_augment import LEVEL_TO_ARG, NAME_TO_OP, AutoAugment
from timm.data.transforms import MaybeToTensor, ResizeKeepRatio
from torchvision.transforms import Compose, Normalize, RandomCrop

from vision_longhorn.data import (
    DataError,
    augment,
    decode_image,
    device_batches,
    open_shards,
    operations,
    sharing,
    split_transform,
    train_loader,
)
from vision_longhorn.data.augment import Finish, _Box, _sent_ahead
from vision_longhorn.data.images import decode_tensor
from vision_longhorn.data.operations import AFFINE, INDICES, KINDS, OPERATIONS
from vision_longhorn.data.operations import operate as operate_plainly
from vision_longhorn.data.regions import resized_on_cpu
from vision_longhorn.data.sharing import SharedMemory
from vision_longhorn.data.transforms import mend_posterize, train_transform
from vision_longhorn.errors import UserError
from vision_longhorn.training.config import Config, read_config_file

MEAN, STD, FILL = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3), (128, 102, 76)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def posterize_keeps_a_bit():
    """As in training; Pillow 13 refuses what timm's own asks for. Set here, so that no test leans on another."""
    mend_posterize()


def photo(seed=0, size=(90, 70)):
    """A picture with smooth parts, edges and noise."""
    rng = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 6, size[0]), np.linspace(0, 5, size[1]))
    planes = [127 + 80 * np.sin(x * (1 + c) + seed) * np.cos(y + c) + rng.normal(0, 12, x.shape) for c in range(3)]
    pixels = np.stack(planes, -1).clip(20, 240)
    pixels[10:30, 20:50] = 200, 30, 90
    return Image.fromarray(pixels.astype(np.uint8))


def jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


def tensor_of(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def timms(**options):
    return create_transform(
        48,
        is_training=True,
        **{
            "interpolation": "bicubic",
            "mean": MEAN,
            "std": STD,
            "auto_augment": "rand-m9-mstd0.5-inc1",
            "re_prob": 0.25,
            "re_mode": "pixel",
            **options,
        },
    )


def operate(name, argument, image, bilinear=False):
    """One operation on a batch of three, the last of which must be as the first, and the second untouched."""
    images = torch.from_numpy(np.array(image)).expand(3, -1, -1, -1)
    head, plain = [0.0] * 5, Finish((0, 0, 0), (1 / 255, 1 / 255, 1 / 255), None, FILL)
    row = [*head, KINDS.index(name), float(argument), float(bilinear)]
    table = torch.tensor([row, [*head, 0, 0, 0], row], dtype=torch.float64)
    out = plain((images, table), CPU).round().to(torch.uint8)
    assert torch.equal(out[0], out[2]) and torch.equal(out[1], tensor_of(image))
    return out[0]


@pytest.mark.parametrize("name", sorted(LEVEL_TO_ARG))
def test_operations_give_what_pil_gives(name):
    known = {"PosterizeIncreasing": "Posterize", "PosterizeOriginal": "Posterize"}.get(
        name, name.removesuffix("Increasing")
    )
    if known not in KINDS:
        assert name in ("Desaturate", "GaussianBlur", "GaussianBlurRand"), f"{name} cannot run on batches"
        return
    flat, dark = Image.new("RGB", (20, 30), (9, 9, 200)), photo(3).point(lambda value: value // 9)
    for seed, image in enumerate([photo(1), photo(2, (64, 64)), flat, dark]):
        for level in (1.0, 4.5, 9.3, 10.0):
            for resample in (Image.BICUBIC, Image.BILINEAR) if known in AFFINE else (Image.BICUBIC,):
                random.seed(seed)
                arguments = LEVEL_TO_ARG[name](level, {"translate_const": 20}) if LEVEL_TO_ARG[name] else (0,)
                if "Posterize" in name and arguments[0] < 1:
                    continue  # PIL refuses 0 bits
                wanted = tensor_of(
                    NAME_TO_OP[name](
                        image, *(arguments if LEVEL_TO_ARG[name] else ()), fillcolor=FILL, resample=resample
                    )
                )
                got = operate(known, arguments[0], image, resample == Image.BILINEAR)
                off = (wanted.int() - got.int()).abs()
                if known not in AFFINE:
                    assert off.max() == 0, (level, resample)
                # PIL resamples in float64, which can fall to the other side of a whole number.
                assert off.max() <= 1 and (off > 0).float().mean() < 0.1, (level, resample)
                assert (wanted.int() - got.int()).float().mean().abs() < 0.01, (level, resample)


ON_BOTH = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@ON_BOTH
@pytest.mark.parametrize("size", [(33, 32), (5, 7), (2, 9)])
def test_triton_operates_to_the_bit(device, size):
    from vision_longhorn.data import fused

    arguments = {name: [0.0, 0.37, 1.0, 1.63, 200.0] for name in OPERATIONS if name[0].isupper()}
    arguments |= {"Solarize": [0.0, 77.0, 256.0], "SolarizeAdd": [0.0, 31.0, 110.0], "Posterize": [0.0, 1.0, 4.0, 8.0]}
    maps = [AFFINE[name](factor, *size) for name, factor in (("Rotate", -27.3), ("ShearX", 0.29), ("ShearY", -0.11))]
    maps += [AFFINE["TranslateXRel"](0.2, *size), AFFINE["TranslateY"](-3.7, *size)]
    maps += [[1, 0, 0, 0, 1, 0], [1, 0, 1e9, 0, 1, -1e9]]
    wanted = [(name, [value, 0, 0, 0, 0, 0]) for name, values in arguments.items() for value in values]
    wanted += [(name, map) for name in ("bicubic", "bilinear") for map in maps]
    images = torch.randint(0, 256, (3 * len(wanted) + 1, 3, *size), dtype=torch.uint8, device=device)
    images[len(wanted) :] //= torch.randint(1, 99, (2 * len(wanted) + 1, 3, 1, 1), dtype=torch.uint8, device=device)
    images[2 * len(wanted) :] = images[2 * len(wanted) :, :, :1, :1]  # one colour
    layer = [[n, INDICES[name], *numbers] for n, (name, numbers) in enumerate(wanted * 3)]
    layer, fill = sorted(layer, key=lambda row: row[1]), torch.tensor(FILL, device=device).float().view(3, 1, 1)
    rows, kept = torch.tensor([[0.0] * 8, *layer], device=device), images.clone()
    got = fused.operate(images, layer, rows, 1, fill)
    assert torch.equal(images, kept), "the images are changed"
    plain = operate_plainly(images.cpu(), layer, rows.cpu(), 1, fill.cpu())
    for number, kind, *numbers in layer:
        one, other = got[number].cpu(), plain[number]
        assert torch.equal(one, other), (list(OPERATIONS)[kind], numbers, (one.int() - other.int()).abs().max())
    assert torch.equal(got[-1], images[-1]), "an image without an operation"


@ON_BOTH
def test_triton_normalizes_and_erases_to_the_bit(device):
    from vision_longhorn.data import fused

    pixels = torch.randint(0, 256, (5, 3, 35, 33), dtype=torch.uint8, device=device)
    scale, shift = (torch.randn(3, 1, 1, device=device) for _ in range(2))
    boxes = [[4, 0, 0, 3, 35, 20, 0, 0], [1, 0, 34, 32, 35, 33, 0, 0], [2, 0, 7, 0, 8, 33, 0, 0]]
    rows = torch.tensor([[0] * 8, *boxes], dtype=torch.float32, device=device)
    for shape in (35, 33), (1, 1):
        noise, results = torch.randn(3, 3, *shape, device=device), []
        for form, place in (fused, device), (operations, "cpu"):
            images = form.normalize(*(value.to(place) for value in (pixels, scale, shift)))
            assert images.dtype == torch.float32
            form.erase(images, rows.to(place), 1, noise.to(place))
            results.append(images.cpu())
        assert torch.equal(*results)
        assert torch.equal(results[0][4, :, :, 3:20], noise[0].cpu().expand(3, 35, 33)[:, :, 3:20])


def test_transform_is_split_as_it_stands():
    config = Config(auto_augment="rand-m9-mstd0.5-inc1")
    settings = {"input_size": (3, 40, 56), "interpolation": "bicubic", "mean": MEAN, "std": STD}
    crops, finish = split_transform(train_transform(settings, config.values()))
    images, table = crops.collate([crops((tensor_of(photo()), None))])
    assert images.shape == (1, 40, 56, 3) and images.dtype == torch.uint8
    assert table.shape == (1, 5 + 3 * 3)  # a flip and two operations
    out = finish((images, table), CPU)
    assert out.shape == (1, 3, 40, 56) and out.dtype == torch.float32
    plain = Config(auto_augment=None, color_jitter=None, hflip=0.0, re_prob=0.0, scale=[1.0, 1.0], ratio=[1.4, 1.4])
    crops, finish = split_transform(train_transform(settings, plain.values()))
    batch = crops.collate([crops((tensor_of(photo(size=(56, 40))), None))])
    kept = batch[0].clone()
    mean, std = (torch.tensor(value).view(3, 1, 1) for value in (MEAN, STD))
    wanted = (tensor_of(photo(size=(56, 40))) / 255 - mean) / std
    torch.testing.assert_close(finish(batch, CPU)[0], wanted, rtol=0, atol=1e-5)
    assert torch.equal(batch[0], kept), "the caller's batch was changed"


@pytest.mark.parametrize(
    "step, options",
    [
        ("AugMix", {"auto_augment": "augmix-m3"}),
        ("Desaturate", {"auto_augment": "3a"}),
        ("ColorJitter", {"auto_augment": None, "color_jitter": (0.1, 0.1, 0.1, 0.1)}),
        ("Crop", {"interpolation": "nearest"}),
        ("Resize", {"no_aug": True}),
        ("RandomErasing", {"re_count": 3}),
    ],
)
def test_what_cannot_be_split_is_named(step, options):
    with pytest.raises(UserError, match=step):
        split_transform(timms(**options))


@pytest.mark.parametrize("flips", [(0.5, 0.0), (0.0, 0.5), (0.5, 0.5)], ids=["h", "v", "both"])
def test_same_seed_same_crop_box_and_flip(flips):
    # With one interpolation timm draws box and flip the same way in both paths, so seeds bring the same pictures.
    image, off = photo(4, (130, 100)), []
    whole = create_transform(
        48,
        is_training=True,
        interpolation="bicubic",
        color_jitter=None,
        mean=MEAN,
        std=STD,
        hflip=flips[0],
        vflip=flips[1],
    )
    crops, finish = split_transform(whole)
    for seed in range(60):
        random.seed(seed), torch.manual_seed(seed)
        wanted = whole(image)
        random.seed(seed), torch.manual_seed(seed)
        got = finish(crops.collate([crops((tensor_of(image), None))]), CPU)[0]
        off.append((wanted - got).abs() * torch.tensor(STD).view(3, 1, 1) * 255)
    off = torch.stack(off)
    # Resampling of uint8 tensors rounds its weights otherwise than PIL.
    assert off.mean() < 0.15 and (off > 1.01).float().mean() < 0.02 and off.max() < 12


@pytest.mark.parametrize("padding", [0, 3, 30, 70])
def test_crops_of_padded_images_are_torchvisions_wherever_they_lie(padding):
    """With a margin wider than the image, also beside it."""
    settings = {"input_size": (3, 40, 24), "interpolation": "bicubic", "mean": MEAN, "std": STD}
    whole = train_transform(settings, Config(crop_padding=padding, hflip=0.0, auto_augment=None, re_prob=0.0).values())
    crops, _ = split_transform(whole)
    crop = next(step for step in whole.transforms if isinstance(step, RandomCrop))
    image = tensor_of(photo(6, (24, 40)))
    for seed in range(60):
        torch.manual_seed(seed)
        wanted = crop(image)
        torch.manual_seed(seed)
        assert torch.equal(crops((image, None))[0].permute(2, 0, 1), wanted)


@pytest.mark.parametrize(
    "options",
    [
        {"padding": 4, "fill": 7},
        {"padding": (2, 5), "padding_mode": "reflect"},
        {"padding": [1, 2, 3, 4], "padding_mode": "edge"},
        {"pad_if_needed": True, "fill": 9},
    ],
)
def test_any_padding_that_tensors_know_is_that_of_pictures(options):
    image = photo(7, (24, 20))
    steps = [ResizeKeepRatio(20), RandomCrop((22, 16), **options), MaybeToTensor(), Normalize(MEAN, STD)]
    crops, finish = split_transform(Compose(steps))
    for seed in range(20):
        random.seed(seed), torch.manual_seed(seed)
        wanted = Compose(steps)(image)
        random.seed(seed), torch.manual_seed(seed)
        got = finish(crops.collate([crops((tensor_of(image), None))]), CPU)[0]
        torch.testing.assert_close(got, wanted)


def test_padding_with_a_colour_stays_whole():
    steps = [ResizeKeepRatio(20), RandomCrop(16, padding=4, fill=(1, 2, 3)), MaybeToTensor(), Normalize(MEAN, STD)]
    with pytest.raises(UserError, match="RandomCrop.* cannot run on batches"):
        split_transform(Compose(steps))


@pytest.mark.parametrize("size", [(40, 40), (90, 70)], ids=["as_they_are", "shrunk"])
def test_padded_crops(size):
    plain = Config(crop_padding=4, auto_augment=None, color_jitter=None, re_prob=0.0)
    settings = {"input_size": (3, 40, 40), "interpolation": "bicubic", "mean": MEAN, "std": STD}
    whole = train_transform(settings, plain.values())
    crops, finish = split_transform(whole)
    white = Image.new("RGB", size, (255, 255, 255))
    margins, off = set(), []
    for seed in range(80):
        views = []
        for image in (photo(6, size), white):
            random.seed(seed), torch.manual_seed(seed)
            views.append(whole(image))
            random.seed(seed), torch.manual_seed(seed)
            views.append(finish(crops.collate([crops((tensor_of(image), None))]), CPU)[0])
        off.append((views[0] - views[1]).abs() * torch.tensor(STD).view(3, 1, 1) * 255)
        assert torch.equal(views[2], views[3]), "the same draws leave the same margin"
        lit = (views[2][0] > 0).int()
        margins.add((lit[0].max().item() == 0, lit[:, 0].max().item() == 0, lit.sum().item()))
        assert lit.sum() >= 36 * 36, "more than 4 pixels of a side are missing"
    off = torch.stack(off)
    assert off.max() < (0.01 if size == (40, 40) else 12) and off.mean() < 0.15
    assert len(margins) > 10 and {margin[:2] for margin in margins} >= {(True, True), (True, False), (False, True)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"auto_augment": "v0"},
        {"auto_augment": None, "color_jitter": 0.4},
        {"interpolation": "random", "re_mode": "rand"},
    ],
    ids=str,
)
def test_pixels_have_the_same_distribution(options):
    whole = timms(**options)
    crops, finish = split_transform(whole)
    images = [photo(n, (110, 80)) for n in range(4)]
    draws = 350

    def figures(pictures):
        """Per picture: mean, standard deviation, contrast of neighbours, and the share of pixels off the range."""
        return [
            [
                p.mean().item(),
                p.std().item(),
                (p[:, 1:] - p[:, :-1]).abs().mean().item(),
                (p.abs() > 3.5).float().mean().item(),
            ]
            for p in pictures
        ]

    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    ones = figures(whole(images[n % 4]) for n in range(draws))
    tensors = [tensor_of(image) for image in images]
    batches = ([crops((tensors[n % 4], None)) for n in range(start, start + 50)] for start in range(0, draws, 50))
    others = figures(p for b in batches for p in finish(crops.collate(b), CPU))
    for number, (one, other) in enumerate(zip(zip(*ones, strict=True), zip(*others, strict=True), strict=True)):
        spread = (statistics.variance(one) / draws + statistics.variance(other) / draws) ** 0.5
        assert abs(statistics.mean(one) - statistics.mean(other)) <= 4 * spread + 1e-6
        if number < 3:
            assert statistics.stdev(other) == pytest.approx(statistics.stdev(one), rel=0.25)


@pytest.mark.parametrize("size", [(60, 50), (200, 150)], ids=["enlarged", "shrunk"])
def test_colours_are_corrected_before_or_after_resampling(size):
    data = jpeg(photo(5, size), quality=95, icc_profile=swapped_profile())
    crops, _ = split_transform(timms(auto_augment=None, color_jitter=None, hflip=0.0, re_prob=0.0))
    views = []
    for image in (decode_tensor(data), (tensor_of(decode_image(data)), None)):
        random.seed(3), torch.manual_seed(3)
        views.append(crops(image)[0].int())
    assert decode_tensor(data)[1] is not None
    off = (views[0] - views[1]).abs()
    assert off.float().mean() < 0.5 and (off > 3).float().mean() < 0.02
    random.seed(3), torch.manual_seed(3)
    untouched = crops((decode_tensor(data)[0], None))[0].int()
    assert (untouched - views[1]).abs().float().mean() > 10, "a profile without effect shows nothing"


def test_erasing_follows_timm():
    whole = timms(re_prob=1.0)
    crops, finish = split_transform(whole)
    eraser = copy.copy(whole.transforms[-1])
    eraser.per_pixel, shares = False, []
    for seed in range(200):
        random.seed(seed)
        wanted = eraser(torch.ones(3, 48, 48)) == 0
        random.seed(seed)
        box = _Box(48, 48)
        crops.eraser(box)
        top, left, bottom, right = box.box
        got = torch.zeros(3, 48, 48, dtype=torch.bool)
        got[:, top:bottom, left:right] = True
        assert torch.equal(wanted, got)
        shares.append(got.float().mean().item())
    assert 0.02 < min(shares) + 0.005 and max(shares) < 0.34

    image = torch.full((4, 48, 48, 3), 100, dtype=torch.uint8)
    table = torch.zeros(4, 5 + 9, dtype=torch.float64)
    table[:, 0], table[1:, 1:5] = 7, torch.tensor([10.0, 4.0, 30.0, 44.0])
    out = finish((image, table), CPU)
    assert torch.equal(out, finish((image, table), CPU)), "noise is to follow the seed"
    noise = out[1:, :, 10:30, 4:44]
    assert abs(noise.mean()) < 0.05 and abs(noise.std() - 1) < 0.05
    out[1:, :, 10:30, 4:44] = out[0, :, 10:30, 4:44]
    assert torch.equal(out[0], out[1]) and torch.equal(out[0], out[3]), "outside of the box nothing changes"


def erasing(size, re_mode, re_prob):
    """A transform that crops and erases, whole and in its two halves."""
    whole = create_transform(
        size,
        is_training=True,
        interpolation="bicubic",
        color_jitter=None,
        hflip=0.0,
        mean=MEAN,
        std=STD,
        re_prob=re_prob,
        re_mode=re_mode,
    )
    return whole, *split_transform(whole)


@pytest.mark.parametrize("size", [(48, 48), (20, 44)], ids=str)
def test_all_that_timm_erases_is_erased_and_nothing_else(size, monkeypatch):
    """Wherever the box lies: at an edge, wide or high, in a picture that is not square."""
    monkeypatch.setattr(random, "choice", lambda values: values[0])  # timm draws none where there is one interpolation
    whole, crops, finish = erasing(size, "const", 0.7)
    image, wanted, halves = photo(7, (60, 90)), [], []
    for seed in range(200):
        for made, transform, source in ((wanted, whole, image), (halves, crops, (tensor_of(image), None))):
            random.seed(seed), torch.manual_seed(seed)
            made.append(transform(source))
    # 0 is the mean, which no pixel has: no whole number of red is half of 255.
    erased = (torch.stack(wanted) == 0).all(1)
    assert torch.equal((finish(crops.collate(halves), CPU) == 0).all(1), erased)
    assert 100 < erased.any((1, 2)).sum() < 180
    sides = torch.cat([erased[:, 0].any(1), erased[:, -1].any(1), erased[..., 0].any(1), erased[..., -1].any(1)])
    assert sides.view(4, 200).any(1).all(), "no box came to an edge"


@pytest.mark.parametrize("re_mode", ["pixel", "rand"])
def test_noise_differs_between_images_batches_and_with_pixel_between_pixels(re_mode):
    _, crops, finish = erasing((24, 32), re_mode, 1.0)
    random.seed(0), torch.manual_seed(0)
    batches = [crops.collate([crops((tensor_of(photo(n)), None)) for n in range(8)]) for _ in "ab"]
    first, parts = set(), []
    for images, (_, table) in zip(finish.together(batches, CPU), batches, strict=True):
        for image, (top, left, bottom, right) in zip(images, table[:, 1:5].int().tolist(), strict=True):
            part = image[:, top:bottom, left:right].flatten(1)
            first.add(tuple(part[:, 0].tolist()))
            parts.append(part if re_mode == "pixel" else part[:, :1])
            assert (part == part[:, :1]).all() == (re_mode == "rand")
    assert len(first) == 16, "two have the same noise"
    values = torch.cat(parts, 1)
    assert abs(values.mean()) < 0.5 and 0.6 < values.std() < 1.4


@pytest.mark.parametrize("re_mode", ["pixel", "rand", "const"])
def test_batches_finished_together_are_as_each_alone(re_mode):
    crops, finish = split_transform(timms(re_mode=re_mode, re_prob=0.5))
    random.seed(0), torch.manual_seed(0)
    sizes = (1, 7, 3, 16, 2)
    batches = [crops.collate([crops((tensor_of(photo(n)), None)) for n in range(k)]) for k in sizes]
    batches[2][1][:, 1:5] = 0  # nothing erased
    alone = [finish(batch, CPU) for batch in batches]
    for one, other in zip(alone, finish.together(batches, CPU), strict=True):
        assert torch.equal(one, other)
    assert any((one == 0).all(1).any() for one in alone) == (re_mode == "const")


@pytest.mark.parametrize("policy", ["rand-m9", "rand-m9-inc1", "v0", "original"])
def test_each_operation_is_noted_as_the_one_that_timm_would_do(policy):
    crops, _ = split_transform(timms(auto_augment=policy))
    noted = {op.name: KINDS[int(op.aug_fn([], 1.0)[0])] for op in crops.policies[-1][0].all_ops}
    assert len(noted) > 9 and all(NAME_TO_OP[name] is NAME_TO_OP[kind] for name, kind in noted.items())


def test_colour_jitter_is_torchvisions():
    """Each factor for its own operation, in the order drawn."""
    image = photo(9, (48, 48))
    for strengths in (0.4, 0, 0), (0, 0.4, 0), (0, 0, 0.4), (0.4, 0.4, 0.4):
        whole = timms(auto_augment=None, color_jitter=strengths, scale=(1, 1), ratio=(1, 1), hflip=0.0, re_prob=0.0)
        crops, finish = split_transform(whole)
        for seed in range(6):
            torch.manual_seed(seed)
            wanted = whole(image)
            torch.manual_seed(seed)
            got = finish(crops.collate([crops((tensor_of(image), None))]), CPU)[0]
            assert (wanted - got).abs().max() < 2.1 / 255 / min(STD)


def test_pictures_are_flipped_before_they_are_turned():
    image = photo(3, (48, 48))
    row = [0.0] * 5 + [KINDS.index("Horizontal"), 0.0, 0.0, KINDS.index("Rotate"), 30.0, 0.0]
    plain = Finish((0, 0, 0), (1 / 255, 1 / 255, 1 / 255), None, FILL)
    batch = torch.from_numpy(np.array(image))[None], torch.tensor([row], dtype=torch.float64)
    flipped = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    assert torch.equal(plain(batch, CPU)[0].round().to(torch.uint8), operate("Rotate", 30, flipped))


@pytest.mark.parametrize("interpolation, kinds", [("bicubic", {0}), ("bilinear", {1}), ("random", {0, 1})])
def test_crops_and_policies_resample_as_the_transform_says(interpolation, kinds):
    crops, _ = split_transform(timms(interpolation=interpolation, scale=(1, 1), ratio=(1, 1), hflip=0.0))
    image = tensor_of(photo(8, (70, 70)))
    views, table = crops.collate([crops((image, None)) for _ in range(60)])
    notes = table[:, 5:].reshape(-1, 3).int().tolist()
    assert {bilinear for kind, _, bilinear in notes if KINDS[kind] in AFFINE} == kinds
    assert len({view.numpy().tobytes() for view in views}) == len(kinds)


@ON_BOTH
def test_triton_resizes_regions_as_torch_does(device):
    from vision_longhorn.data.resize import resize

    images = [np.array(photo(n, size)) for n, size in enumerate(((17, 13), (5, 1), (31, 40)))]
    pixels = torch.from_numpy(np.concatenate([image.ravel() for image in images]))
    starts, places = np.cumsum([0, *(image.size for image in images)]), []
    for start, image in zip(starts, images):
        height, width, _ = image.shape
        places += [[start, width, 0, 0, height, width, is_bicubic] for is_bicubic in (0, 1)]
        places += [[start, width, height // 3, width // 2, height - height // 3, width - width // 2, 1]]
    places = torch.tensor(np.array(places))
    for size in (16, 16), (7, 23), (1, 1):
        found = resize(pixels.to(device), places.to(device), 40, size).cpu()
        off = (found.int() - resized_on_cpu(pixels, places, size).int()).abs()
        assert off.max() <= 1 and (off > 0).float().mean() < 0.02


@pytest.mark.parametrize("interpolation", ["bicubic", "random"])
def test_crops_on_the_device_are_those_of_the_workers(monkeypatch, interpolation):
    monkeypatch.setattr(augment, "_LARGE", 3)  # pixels for each of the 48 x 48
    files = [jpeg(photo()), encode(scene(), icc_profile=swapped_profile()), jpeg(photo(2, (100, 90)))]
    files += [encode(scene(), "PNG"), encode(Image.new("RGB", (40, 1), (9, 90, 200))), jpeg(photo(3).convert("L"))]
    large = encode(scene().resize((120, 90)), icc_profile=swapped_profile())
    whole = timms(interpolation=interpolation)
    decoded = [split_transform(whole, True)[0].decode(data) for data in [*files, large]]
    assert torch.equal(decoded[1][0], tensor_of(decode_image(files[1]))), "colours are corrected once for all views"
    assert [correct is not None for _, correct in decoded] == [False] * 6 + [True]
    results = []
    for crop_on_device in (False, True):
        crops, finish = split_transform(whole, crop_on_device)
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        batch = crops.collate([crops(image) for image in decoded for _ in range(3)])
        results.append(finish(batch, CPU))
        assert finish.nbytes(batch) == 21 * 3 * 48 * 48
    assert torch.equal(*results)
    assert all(torch.equal(one, results[0]) for one in finish.together([batch] * 3, CPU))
    starts, places = batch[1][:, 0].view(7, 3).tolist(), batch[1][:, 1:].tolist()
    assert all(len(set(found)) == (3 if n in (2, 6) else 1) for n, found in enumerate(starts)), "an image is there once"
    assert all(places[n] == [48, 0, 0, 48, 48, 0] for n in (6, 7, 8, 18, 19, 20)), "workers crop what is large"


def test_draws_are_all_made_with_the_crop():
    crops, finish = split_transform(timms())
    image, tables, results = tensor_of(photo()), [], []
    for _ in range(2):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        batch = crops.collate([crops((image, None)) for _ in range(16)])
        tables.append(batch[1])
        random.seed(len(tables)), np.random.seed(len(tables)), torch.manual_seed(len(tables))
        before = torch.get_rng_state()
        results.append(finish(batch, CPU))
        assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(*tables) and torch.equal(*results)


@pytest.mark.parametrize("workers, crop_on_device", [(0, False), (0, True), (2, False), (2, True)])
def test_halves_in_a_loader_skip_and_go_on_as_the_whole_does(tmp_path, workers, crop_on_device):
    files = [
        (f"s{n:02d}.{end}", data)
        for n in range(24)
        for end, data in (("jpg", jpeg(photo(n)) if n != 9 else jpeg(photo(n))[:-500]), ("cls", b"%d" % n))
    ]
    write_tar(tmp_path / "train-0.tar", files)
    shards = open_shards(tmp_path, num_samples=24, num_classes=24)
    crops, finish = split_transform(timms(), crop_on_device)
    loader = train_loader(shards, crops, batch_size=4, num_workers=workers, repeats=3, max_bad_samples=2)
    whole = [(images.clone(), targets) for images, targets in device_batches(loader, "cpu", finish)]
    assert len(whole) == 6 and whole[0][1].tolist()[:3] == [whole[0][1][0]] * 3
    assert not torch.equal(whole[0][0][0], whole[0][0][1]), "each view has its own draws"
    for start in (1, 4):
        loader.set_epoch(0, start)
        for one, other in zip(whole[start:], device_batches(loader, "cpu", finish), strict=True):
            assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert 9 not in {label for _, targets in loader for label in targets.tolist()}
        found = [text for text, _ in loader.skipped]
        if found:
            break
    assert "sample s09: not a readable image" in found[0]


def test_pinned_batches_take_two_pieces_of_memory_in_turn(monkeypatch):
    monkeypatch.setattr(sharing, "get_worker_info", lambda: "a worker")
    memory = SharedMemory(is_pinned=True)
    first, second, third = (memory(size) for size in (100, 100, 110))
    assert first.is_shared() and len(third) == 110
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()
    monkeypatch.setattr(sharing, "_shared", lambda size: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        memory(1000)
    again = [memory(10).data_ptr() for _ in range(3)]
    assert again[0] == again[2] != again[1]
    monkeypatch.undo()
    assert not SharedMemory(is_pinned=True)(9).is_shared()


@pytest.mark.parametrize("pin_memory", [False, pytest.param(True, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("crop_on_device", [False, True])
def test_a_batch_stays_while_a_worker_makes_the_next_ones(tmp_path, crop_on_device, pin_memory):
    files = [(f"s{n:02d}.{end}", data) for n in range(24) for end, data in (("jpg", jpeg(photo(n))), ("cls", b"1"))]
    write_tar(tmp_path / "train-0.tar", files)
    shards, batches = open_shards(tmp_path, num_samples=24, num_classes=2), []
    for workers in (0, 1):  # in the same order
        crops, finish = split_transform(timms(), crop_on_device)
        loader = train_loader(shards, crops, batch_size=2, num_workers=workers, repeats=2, pin_memory=pin_memory)
        batches.append(list(loader))
    assert len(batches[0]) == 12
    for (one, _), (other, _) in zip(*batches, strict=True):
        assert other[0].is_pinned() == pin_memory
        assert torch.equal(finish(one, CPU), finish(other, CPU))


def test_batches_on_a_device():
    batches = [(torch.full((2, 3, 4, 4), float(n)), torch.tensor([n, n])) for n in range(3)]
    seen = [(images[0, 0, 0, 0].item(), targets.tolist()) for images, targets in device_batches(batches, "cpu")]
    assert seen == [(n, [n, n]) for n in range(3)]
    assert list(device_batches([], "cpu")) == []
    crops, finish = split_transform(timms())
    batch = (crops.collate([crops((tensor_of(photo()), None))] * 2), torch.tensor([3, 3]))
    ((images, targets),) = device_batches([batch], "cpu", finish)
    assert images.shape == (2, 3, 48, 48) and targets.tolist() == [3, 3]
    places = [("shard", "a"), ("shard", "b")]
    ((*_, told),) = device_batches([(*batch, places)], "cpu", finish)
    assert told == places


def test_small_batches_are_gathered_without_running_ahead_of_the_loader():
    taken = []

    def loader():
        for number in range(40):
            taken.append(number)
            yield [torch.zeros(100, dtype=torch.uint8), None], number

    sent, seen = [], []

    def send(group):
        assert len(sent) < 2 or set(sent[-2]) <= set(seen), "a group is sent before the last but one is used"
        sent.append([number for _, number in group])
        return group

    before = 0

    def nbytes(inputs):
        return inputs[0].nbytes

    for _, number in _sent_ahead(loader(), send, lambda: None, nbytes, 800):
        seen.append(number)
        assert len(taken) - len(seen) <= 16, "more than two groups wait"
        assert number < 8 or len(taken) <= before + 1, "several batches are taken at once"
        before = len(taken)
    assert seen == list(range(40)) and [len(group) for group in sent] == [1, 2, 4, 8, 8, 8, 8, 1]
    for own, most in (nbytes, 50), (None, 800):
        sent.clear()
        assert [number for _, number in _sent_ahead(loader(), send, lambda: None, own, most)] == list(range(40))
        assert {len(group) for group in sent} == {1}
    pictures = [(torch.zeros(3), 0)] * 2
    assert len(list(_sent_ahead(pictures, lambda group: group, lambda: None, None))) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("auto_augment, crop_on_device", [("rand-m9-mstd0.5-inc1", False), ("v0", False), (None, True)])
def test_a_gpu_gives_what_the_cpu_gives(auto_augment, crop_on_device):
    options = dict(auto_augment=auto_augment, color_jitter=None, re_mode="const")
    crops, finish = split_transform(timms(**options), crop_on_device)
    images = [tensor_of(photo(n)) for n in range(8)]
    images.append(tensor_of(photo(9, (100, 110))))
    batches = [
        (crops.collate([crops((image, None)) for image in images[: 5 + n] * 8]), torch.ones(8)) for n in range(5)
    ]
    wanted = [images for images, _ in device_batches(batches, "cpu", finish)]
    pinned = [([value.pin_memory() for value in inputs], targets.pin_memory()) for inputs, targets in batches]
    for one, (images, targets) in zip(wanted, device_batches(pinned, "cuda", finish), strict=True):
        assert images.is_cuda and targets.is_cuda
        off = (one - images.cpu()).abs() * torch.tensor(STD).view(3, 1, 1) * 255
        assert (off > 0.01).float().mean() < (0.006 if crop_on_device else 0.002)
        assert not crop_on_device or off.max() < 2.01


@pytest.mark.gpu
@pytest.mark.parametrize("crop_on_device", [False, True])
def test_fetching_ahead_neither_waits_for_the_gpu_nor_mixes_batches_up(crop_on_device):
    crops, finish = split_transform(timms(re_mode="const"), crop_on_device)
    sent, *others = crops.collate([crops((tensor_of(photo(n)), None)) for n in range(32)])
    batches = [([(sent + n).pin_memory(), *others], torch.tensor([n])) for n in range(12)]
    wanted = [images.double().sum().item() for images, _ in device_batches(batches, "cpu", finish)]
    busy, sums = torch.randn(4096, 4096, device="cuda"), []
    list(device_batches(batches, "cuda", finish))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for images, _ in device_batches(batches, "cuda", finish):
            for _ in range(5):
                busy = (busy @ busy).tanh()
            sums.append(images.double().sum())
            images.zero_()  # and what is freed now must not be written to too early
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(wanted, torch.stack(sums).tolist(), strict=True):
        assert other == pytest.approx(one, rel=1e-3, abs=5.0)


def exif_behind_the_size(data):
    """Move the EXIF data of a JPEG to just before its pixels."""
    start = data.index(b"\xff\xe1")
    stop = start + 2 + int.from_bytes(data[start + 2 : start + 4], "big")
    rest = data[:start] + data[stop:]
    pixels = rest.index(b"\xff\xda")
    return rest[:pixels] + data[start:stop] + rest[pixels:]


@pytest.mark.parametrize(
    "data",
    [
        encode(scene()),
        encode(scene("L")),
        encode(scene(), progressive=True),
        encode(scene("CMYK")),
        encode(scene(), icc_profile=swapped_profile()),
        encode(photo().convert("L"), icc_profile=gray_profile()),
        *(encode(image, exif=exif) for image, exif in map(rotated, range(2, 9))),
        exif_behind_the_size(encode(rotated(6)[0], exif=rotated(6)[1])),
        encode(scene(), "PNG"),
        encode(scene("P"), "PNG"),
        encode(Image.new("RGB", (1, 40))),
        jpeg(photo(), subsampling=2, quality=80),
    ],
    ids=[
        *("rgb", "gray", "progressive", "cmyk", "profile", "gray-profile", *(f"turned-{n}" for n in range(2, 9))),
        *("late", "png", "palette", "narrow", "subsampled"),
    ],
)
def test_decoding_to_tensors_is_the_same_to_the_bit(data):
    wanted = tensor_of(decode_image(data))
    image, correct = decode_tensor(data)
    part = (slice(None), slice(3, 30), slice(0, 21))
    assert image.shape == wanted.shape and image.dtype == torch.uint8
    assert torch.equal(correct(image) if correct else image, wanted)
    assert torch.equal(correct(image[part]) if correct else image[part], wanted[part])


def test_decoding_to_tensors_refuses_the_same_files():
    data = encode(photo(size=(200, 160)))
    short = (b"\xff\xe0\0\6JFIF", b"\xff\xee\0\7Adobe", b"\xff\xed\0\x16Photoshop 3.0\0" + b"8BIM\4\4")
    more = [data[:2] + segment + data[2:] for segment in short]
    for broken in (data[: len(data) * 2 // 3], data[:-300], data[:40], b"", b"text", encode(scene(), "GIF"), *more):
        for decode in decode_image, decode_tensor:
            with pytest.raises(DataError, match="not a readable image"):
                decode(broken)


def test_jpegs_are_turned_and_corrected_without_pils_decoder(monkeypatch):
    turned, profiled = encode(rotated(6)[0], exif=rotated(6)[1]), encode(scene("L"), icc_profile=gray_profile())
    wanted = [tensor_of(decode_image(data)) for data in (turned, profiled)]
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("PIL decoded the file, which takes longer"))
    assert torch.equal(decode_tensor(turned)[0], wanted[0])
    image, correct = decode_tensor(profiled)
    assert correct and (image.int() - wanted[1].int()).abs().max() > 10, "a profile without effect shows nothing"


def test_ordinary_jpegs_are_decoded_without_pil(monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *args, **kwargs: pytest.fail("PIL read the header, which takes longer"))
    for data in encode(scene()), encode(scene("L")), encode(scene(), progressive=True, comment=b"a"):
        assert decode_tensor(data)[1] is None


def test_the_policy_for_cifar_is_that_of_its_paper_in_both_halves():
    cfg = Config(**{**read_config_file("cifar10"), "auto_augment": "cifar10"})
    settings = dict(input_size=(3, 32, 32), interpolation="bicubic", mean=cfg.mean, std=cfg.std)
    transform = train_transform(settings, cfg.values())
    policy = next(step for step in transform.transforms if isinstance(step, AutoAugment)).policy
    assert len(policy) == 25 and all(len(pair) == 2 for pair in policy)
    assert [(op.name, op.prob) for op in policy[0]] == [("Invert", 0.1), ("ContrastIncreasing", 0.2)]
    assert [op.name for op in policy[1]] == ["Rotate", "TranslateXRel"]
    split_transform(transform)  # which refuses what a GPU has no form for
