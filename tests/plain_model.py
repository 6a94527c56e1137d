"""The whole model, written out plainly from the description of the papers, to compare the fast one with."""

import math

import torch
from vision_longhorn.kernels.rules import get_rule


def plain_conv(p, i, x):
    weight, out = p["conv_weight"][i], []
    for t in range(x.shape[1]):
        seen = [weight[:, -1 - age] * x[:, t - age] for age in range(weight.shape[1]) if age <= t]
        out.append(p["conv_bias"][i] + sum(seen))
    out = torch.stack(out, 1)
    return out / (1 + torch.exp(-out))


def plain_grid_conv(p, x, rows):
    weight, B, (L, D) = p["conv_weight"][0], len(x), x.shape[1:]
    columns, reach = L // rows, weight.shape[1] // 2
    grid, out = x.reshape(B, rows, columns, D), []
    for row in range(rows):
        for column in range(columns):
            seen = [
                weight[:, y - row + reach, z - column + reach] * grid[:, y, z]
                for y in range(max(0, row - reach), min(rows, row + reach + 1))
                for z in range(max(0, column - reach), min(columns, column + reach + 1))
            ]
            out.append(p["conv_bias"][0] + sum(seen))
    out = torch.stack(out, 1)
    return out / (1 + torch.exp(-out))


def plain_turn(v, rows):
    """Keys or queries (.., L, N) of patches, row by row, with each pair of numbers turned by its row or column."""
    L, N = v.shape[-2:]
    out = v.clone()
    for t in range(L):
        for axis, place in enumerate(divmod(t, L // rows)):
            for i in range(N // 4):
                wavelength = 4 * 8 ** (i / max(1, N // 4 - 1))  # in patches
                angle = torch.tensor(2 * math.pi * place / wavelength, dtype=torch.float64)
                at = axis * N // 2 + 2 * i
                x, y = v[..., t, at], v[..., t, at + 1]
                out[..., t, at] = x * angle.cos() - y * angle.sin()
                out[..., t, at + 1] = x * angle.sin() + y * angle.cos()
    return out


def what_scans_read(p, x, mixer, rows=0):
    """The convolved x for the scan ahead, and for the scan back with the tokens in reverse order."""
    if mixer.over_grid:
        ahead = plain_grid_conv(p, x, rows)
    else:
        ahead = plain_conv(p, 0, x)
        if mixer.wiring != "shared":
            # The backward direction is a forward one that is shown the tokens in reverse order.
            return ahead, plain_conv(p, len(p["D"]) - 1, x.flip(1))
    return ahead, ahead.flip(1)


def plain_scan(p, i, x, mixer, rows=0, back=False, values=None):
    rank, N = mixer.dt_rank, mixer.d_state
    low = x @ p["x_proj"][i].t()
    k, q, a = low[..., rank : rank + N], low[..., rank + N : rank + 2 * N], low[..., rank + 2 * N :]
    if mixer.rope:
        k, q = (plain_turn(v.flip(1), rows).flip(1) if back else plain_turn(v, rows) for v in (k, q))
    if mixer.qk_norm:
        k, q = (v / torch.sqrt((v * v).sum(-1, keepdim=True) + 1e-6) for v in (k, q))
    logit = low[..., :rank] @ p["dt_proj"][i].t() + p["dt_bias"][i]
    x = x if values is None else values
    state, ys = x.new_zeros(x.shape[0], x.shape[2], N), []
    for t in range(x.shape[1]):
        key, value = k[:, t, None, :], x[:, t, :, None]
        if mixer.rule == "mamba":
            dt = torch.log1p(torch.exp(logit[:, t]))[..., None]
            rate = torch.exp(p["A_log"][i] + a[:, t, None]) if a.shape[-1] else torch.exp(p["A_log"][i])
            state = torch.exp(-dt * rate) * state + dt * value * key
        elif mixer.rule not in ("diagonal", "exact"):
            state = get_rule(mixer.rule).update(state, x[:, t], logit[:, t], k[:, t], None, softplus=True)
        else:
            beta = torch.sigmoid(logit[:, t])[..., None]
            eps = beta / (1 + beta * (key * key).sum(-1, keepdim=True))
            if mixer.rule == "exact":
                state = state + eps * (value - (state * key).sum(-1, keepdim=True)) * key
            else:
                state = (1 - eps * key * key) * state + eps * value * key
        read = (state * q[:, t, None, :]).sum(-1)
        ys.append(read if mixer.gate == "skip" else read + p["D"][i] * x[:, t])
    return torch.stack(ys, 1)


def plain_norm(x, weight):
    return x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def plain_mixer(p, h, mixer, rows=0):
    x = h @ p["in_proj.weight"].t()
    gate = 1.0
    if mixer.gate != "none":
        x, z = x.chunk(2, -1)
        gate = z / (1 + torch.exp(-z))
    ahead, back = what_scans_read(p, x, mixer, rows)
    values = None, None
    if mixer.gate == "value":
        values, gate = (gate, gate.flip(1)), 1.0
    if mixer.wiring == "shared":
        forward = plain_scan(p, 0, ahead, mixer, rows)
        backward = plain_scan(p, 0, back, mixer, rows, True).flip(1)
        y = (plain_norm(forward, p["norm_weight"][0]) + plain_norm(backward, p["norm_weight"][1])) * gate
    elif mixer.wiring in ("forward", "alternate"):
        given = (back, mixer, rows, True, values[1]) if mixer.reversed else (ahead, mixer, rows, False, values[0])
        y = plain_scan(p, 0, *given)
        y = y.flip(1) if mixer.reversed else y
        seen = back.flip(1) if mixer.reversed else ahead
        y = y + p["D"][0] * seen * gate if mixer.gate == "skip" else y * gate
    else:
        forward = plain_scan(p, 0, ahead, mixer, rows, False, values[0])
        backward = plain_scan(p, 1, back, mixer, rows, True, values[1]).flip(1)
        if mixer.gate == "skip":
            y = (forward + backward + (p["D"][0] * ahead + p["D"][1] * back.flip(1)) * gate) / 2
        else:
            y = (forward * gate + backward * gate) / 2
    return y @ p["out_proj.weight"].t()


def reading_order(block, rows, count):
    """The numbers of the tokens in the order in which a block reads them."""
    tokens = list(range(count))
    if not block.reads_columns:
        return torch.tensor(tokens)
    place = {"first": 0, "middle": (count - 1) // 2, "last": count - 1, "none": None}[block.class_token]
    own = [] if place is None else [tokens.pop(place)]
    columns = len(tokens) // rows
    tokens = [tokens[row * columns + column] for column in range(columns) for row in range(rows)]
    return torch.tensor(tokens if place is None else tokens[:place] + own + tokens[place:])


def plain_stem(p, grid, strides):
    """From whole patches of images (B, C, H, W) to (B, rows, columns, width)."""
    for number, stride in enumerate(strides):
        weight, bias = p[f"{3 * number}.weight"], p[f"{3 * number}.bias"]
        reach = weight.shape[-1] // 2
        B, C, H, W = grid.shape
        wide = grid.new_zeros(B, C, H + 2 * reach, W + 2 * reach)
        wide[:, :, reach : reach + H, reach : reach + W] = grid
        windows = wide.unfold(2, 2 * reach + 1, stride).unfold(3, 2 * reach + 1, stride)
        x = torch.einsum("bchwij,dcij->bhwd", windows, weight) + bias
        if number < 2:
            x = x - x.mean(-1, keepdim=True)
            x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + 1e-5)
            x = x * p[f"{3 * number + 1}.weight"] + p[f"{3 * number + 1}.bias"]
            grid = (x / (1 + torch.exp(-x))).permute(0, 3, 1, 2)
    return x


def plain_model(p, images, model):
    def of(prefix):
        return {name.removeprefix(prefix): value for name, value in p.items() if name.startswith(prefix)}

    height, width = model.patch_embed.patch_size
    patches = images.unfold(2, height, height).unfold(3, width, width)  # (B, C, H, W, height, width)
    rows = patches.shape[2]
    if "patch_embed.proj.weight" in p:
        x = torch.einsum("bchwij,dcij->bhwd", patches, p["patch_embed.proj.weight"]) + p["patch_embed.proj.bias"]
    else:
        whole = images[:, :, : rows * height, : patches.shape[3] * width]
        x = plain_stem(of("patch_embed.proj."), whole, (height // 4, 2, 2))
    x = x.flatten(1, 2)
    count = x.shape[1]
    index = {"first": 0, "middle": count // 2, "last": count, "none": None}[model.class_token]
    tokens = list(x.unbind(1))
    if index is not None:
        tokens.insert(index, p["cls_token"][0].expand(len(x), -1))
    x = torch.stack(tokens, 1) + p["pos_embed"]
    for i, block in enumerate(model.blocks):
        order = reading_order(block, rows, x.shape[1])
        h = plain_norm(x, p[f"blocks.{i}.norm.weight"])[:, order]
        seen = patches.shape[3] if block.reads_columns else rows
        x = x + plain_mixer(of(f"blocks.{i}.mixer."), h, block.mixer, seen)[:, torch.argsort(order)]
        mlp = of(f"blocks.{i}.mlp.")
        if mlp:
            h = plain_norm(x, p[f"blocks.{i}.mlp_norm.weight"]) @ mlp["fc1.weight"].t() + mlp["fc1.bias"]
            if "conv_weight" in mlp:
                h = plain_grid_conv({name: mlp[name][None] for name in ("conv_weight", "conv_bias")}, h, rows)
            else:
                h = h * (1 + torch.erf(h / 2**0.5)) / 2  # GELU
            x = x + h @ mlp["fc2.weight"].t() + mlp["fc2.bias"]
    tokens = list(plain_norm(x, p["norm.weight"]).unbind(1))
    if model.global_pool == "":
        x = torch.stack(tokens, 1)
    elif model.global_pool == "token":
        x = tokens[index]
    else:
        if index is not None:
            del tokens[index]
        x = torch.stack(tokens, 1).mean(1) if model.global_pool == "avg" else torch.stack(tokens, 1).max(1).values
    return x @ p["head.weight"].t() + p["head.bias"]
