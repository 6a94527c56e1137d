"""Our Muon, which updates many matrices together, beside timm's."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

import vision_longhorn  # noqa: F401  (registers the models)
from vision_longhorn.training.config import Config
from vision_longhorn.training.muon import Muon
from vision_longhorn.training.setup import build_optimizer, load_optimizer

CFG = Config(opt="muon", weight_decay=0.3, opt_betas=[0.8, 0.9])


def timms(model):
    return create_optimizer_v2(model, "muon", lr=0.02, weight_decay=0.3, betas=(0.8, 0.9))


def make():
    """A model with both directions in a block, whose first matrix gets no gradient, and a copy of it."""
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_tiny", img_size=32, embed_dim=32, depth=3, num_classes=7)
    model.blocks[0].mixer.in_proj.weight.requires_grad_(False)
    return model, copy.deepcopy(model)


def update(optimizer, model, number):
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
    optimizer.step()


def close(model, other, start):
    for (name, one), two, was in zip(model.named_parameters(), other.parameters(), start.parameters(), strict=True):
        error, way = (one - two).norm(), (one - was).norm()
        assert error <= 0.01 * way, f"{name} is {error / way} of its way apart"  # updates are made in bfloat16


def test_it_goes_the_way_of_timms():
    model, other = make()
    start = copy.deepcopy(model)
    ours, reference = build_optimizer(CFG, model, 0.02), timms(other)
    assert isinstance(ours, Muon)
    for number in range(4):
        for group in (*ours.param_groups, *reference.param_groups):
            group["lr"] = 0.02 / (number + 1)
        update(ours, model, number)
        update(reference, other, number)
        assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    close(model, other, start)
    moved = [not torch.equal(one, was) for one, was in zip(model.parameters(), start.parameters(), strict=True)]
    assert moved.count(False) == 1  # the one without a gradient


@pytest.mark.parametrize("first, second", [(timms, Muon), (Muon, timms)], ids=["timm's", "ours"])
def test_it_and_timms_go_on_where_the_other_stopped(first, second):
    """Timm's script trains our models, too."""
    model, other = make()

    def build(kind, net):
        return timms(net) if kind is timms else build_optimizer(CFG, net, 0.02)

    optimizer = build(first, model)
    for number in range(3):
        update(optimizer, model, number)
    other.load_state_dict(model.state_dict())
    start = copy.deepcopy(model)
    new = build(second, other)
    settings = SimpleNamespace(opt="muon", resume="last.pt", weight_decay=0.3, layer_decay=None)
    load_optimizer(settings, new, {"optimizer": copy.deepcopy(optimizer.state_dict()), "config": {"opt": "muon"}})
    for number in range(3, 5):
        update(optimizer, model, number)
        update(new, other, number)
    close(model, other, start)


def test_a_copy_goes_on():
    model, other = make()
    optimizer = build_optimizer(CFG, model, 0.02)
    update(optimizer, model, 0)
    model, optimizer = copy.deepcopy((model, optimizer))
    update(optimizer, model, 1)
    reference = build_optimizer(CFG, other, 0.02)
    for number in range(2):
        update(reference, other, number)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_an_update_skipped_on_the_device_changes_nothing():
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    optimizer = Muon(create_optimizer_v2(model, "muon", lr=0.1, weight_decay=0.1))
    update(optimizer, model, 0)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"]))
    optimizer.found_inf = torch.ones(())
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    optimizer.step()
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()["state"]), before, rtol=0, atol=0)
    optimizer.found_inf = torch.zeros(())
    update(optimizer, model, 1)
    assert not torch.equal(model[0].weight, before[0]["0.weight"])


@pytest.mark.gpu
def test_it_gives_the_same_bits_in_cuda_graphs():
    """With rates that change, an update that is skipped, and a state that is loaded on the way."""
    model = make()[0].cuda()
    other = copy.deepcopy(model)
    optimizers = [
        build_optimizer(dataclasses.replace(CFG, cuda_graphs=graphs), net, 0.02)
        for graphs, net in ((False, model), (True, other))
    ]
    generator = torch.Generator("cuda")
    for number in range(9):
        for optimizer, net in zip(optimizers, (model, other), strict=True):
            generator.manual_seed(number)
            for parameter in net.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.randn(parameter.shape, generator=generator, device="cuda")
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (number + 1)
            if number:
                optimizer.found_inf = torch.full((), float(number == 4), device="cuda")
            optimizer.step()
            if number == 5:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(one, two)
    assert optimizers[1]._graph[1] and not optimizers[0]._graph


def test_takes_groups_later():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    optimizer = Muon(timms(first))
    optimizer.add_param_group({"params": [second.weight], "use_muon": True})
    before = second.weight.clone()
    for one in (*first.parameters(), second.weight):
        one.grad = torch.randn_like(one)
    optimizer.step()
    assert not torch.equal(before, second.weight)
