"""Devices and precisions that are not those of the tests' machine, and training that is not the trainer's."""

from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate.state import AcceleratorState
from torch import nn
from vision_longhorn.kernels.dispatch import backend_for, get_backend

import vision_longhorn  # noqa: F401
from vision_longhorn.devices import make_accelerator

SMALL = dict(img_size=16, patch_size=4, depth=2, embed_dim=32, d_state=8)


def test_on_a_mac_commands_take_the_cpu_and_scans_of_ones_own_code_the_torch_path(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    AcceleratorState._reset_state(reset_partial_state=True)  # else it keeps the device that an earlier test found
    accelerator = make_accelerator()
    found = accelerator.device.type, accelerator.mixed_precision
    AcceleratorState._reset_state(reset_partial_state=True)
    assert found == ("cpu", "no")
    assert backend_for("auto", SimpleNamespace(device=torch.device("mps"), dtype=torch.float32)) is get_backend("torch")


@pytest.mark.parametrize("name", ["vlonghorn_tiny", "vim_tiny_best"])
def test_half_precision_trains_beside_float32(name):
    model, images = timm.create_model(name, num_classes=5, **SMALL), torch.randn(3, 3, 16, 16)
    wanted = model(images)
    with torch.autocast("cpu", torch.float16):
        scores = model(images)
    torch.testing.assert_close(scores.float(), wanted, rtol=0.02, atol=2e-3)
    assert scores.dtype == torch.float16
    nn.functional.cross_entropy(scores.float(), torch.tensor([0, 1, 2])).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize("name", ["vlonghorn_tiny_paper", "vlonghorn_tiny"])
def test_masked_patches_are_learnt_from_maps(name):
    """As docs/models.md has it: the images' masked patches are grey, and a linear layer restores them."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=0, **SMALL)
    decoder = nn.Linear(model.num_features, 3 * 4 * 4)
    ramp = torch.linspace(-1, 1, 16)
    images = torch.stack([ramp * ramp[:, None] * scale for scale in (1, -1, 0.5, 2)])[:, None].expand(-1, 3, -1, -1)
    optimizer = torch.optim.AdamW([*model.parameters(), *decoder.parameters()], 2e-3)
    losses = []
    for _ in range(30):
        masked = (torch.rand(4, 1, 4, 4) < 0.5).repeat_interleave(4, 2).repeat_interleave(4, 3)
        (maps,) = model.forward_intermediates(images * ~masked, indices=1, norm=True, intermediates_only=True)
        restored = nn.functional.pixel_shuffle(decoder(maps.movedim(1, 3)).movedim(3, 1), 4)
        loss = ((restored - images).abs() * masked).sum() / (3 * masked.sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5]), losses
