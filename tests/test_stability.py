"""Training in bfloat16 beside float32, at a learning rate that begins ten times too high and falls to 0."""

import pytest
import timm
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import vision_longhorn  # noqa: F401

VARIANTS = {
    "diagonal": dict(),
    "exact": dict(rule="exact"),
    "shared": dict(wiring="shared"),
    "mamba": dict(mixer="mamba"),
    "mamba2": dict(mixer="mamba2"),
    "bf16 sum": dict(residual_in_fp32=False),
}


def loss_curve(steps, bf16, device, **variant):
    """Loss of each step on the digits, (steps,): the same model, batches and schedule whatever the precision."""
    torch.manual_seed(0)
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32, device=device).unsqueeze(1) / 8 - 1
    labels = torch.tensor(digits.target, device=device)
    model = (
        timm.create_model(
            "vlonghorn_test", img_size=8, patch_size=2, in_chans=1, num_classes=10, embed_dim=32, depth=2, **variant
        )
        .to(device)
        .train()
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, 2 - 2 * step / steps))
    order, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        batch = torch.randint(len(images), (32,), generator=order).to(device)
        with torch.autocast(device, torch.bfloat16, enabled=bf16):
            loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach().float())
    assert all(value.isfinite().all() for value in model.parameters())
    return torch.stack(losses).cpu()


def compare(steps, window, device, variant, within):
    """`window` steps make a point of a curve, their mean. In the last quarter they agree to the fraction `within`."""
    curves = [loss_curve(steps, bf16, device, **variant) for bf16 in (False, True)]
    assert all(curve.isfinite().all() for curve in curves)
    assert not torch.equal(*curves)  # or one of them was not what it says
    exact, rounded = (curve.view(-1, window).mean(1) for curve in curves)
    assert exact[-1] < 0.65 * exact[0], exact  # it has learned; 0.5 is what label smoothing leaves
    # At the high rate the losses of both wander, each at other steps, so only the ends of the curves are compared.
    end = len(exact) * 3 // 4
    assert ((rounded / exact - 1)[end:].abs() < within).all(), (exact, rounded)


def test_200_steps_in_bfloat16_follow_float32():
    compare(200, 50, "cpu", VARIANTS["diagonal"], 0.05)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS)
def test_gpu_2000_steps_in_bfloat16_follow_float32(variant):
    compare(2000, 100, "cuda", VARIANTS[variant], 0.01)
