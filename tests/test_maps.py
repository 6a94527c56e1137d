"""Maps of forgetting and write strength, against what one step of the recurrence does to a state."""

import pytest
import timm
import torch
from PIL import Image
from plain_model import plain_mixer, plain_norm, plain_turn, reading_order, what_scans_read
from vision_longhorn.kernels.rules import NAMES, get_rule

import vision_longhorn  # noqa: F401  (registers the models)
from vision_longhorn.checkpoint import save_checkpoint
from vision_longhorn.errors import UserError
from vision_longhorn.maps import main, plot_maps, token_maps
from vision_longhorn.train import load_config

DEPTH, CHANNELS, N = 2, 16, 3


def small(name="vlonghorn_test", **options):
    """Two blocks of width 8, every parameter off its initial value."""
    torch.manual_seed(0)
    sizes = dict(img_size=(12, 20), patch_size=4, embed_dim=CHANNELS // 2, depth=DEPTH, d_state=N, num_classes=3)
    model = timm.create_model(name, **{**sizes, **options}).eval()
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value), alpha=0.3)
    return model


def measured(p, i, x, mixer, rows, back=False):
    """(forgetting, write strength) (B, L) of one direction: what a token does to states that are 1 in one place, and
    what an input of 1 in all channels adds to an empty one. All tokens at once, as one batch."""
    rank, N, update = mixer.dt_rank, mixer.d_state, get_rule(mixer.rule).update
    low = x @ p["x_proj"][i].t()
    if mixer.rope:
        keys = low[..., rank : rank + N]
        keys.copy_(plain_turn(keys.flip(1), rows).flip(1) if back else plain_turn(keys, rows))
    low = low.flatten(0, 1)
    logit = low[:, :rank] @ p["dt_proj"][i].t() + p["dt_bias"][i]
    key = low[:, rank : rank + N]
    if mixer.qk_norm:
        key = key / (key.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    A = None
    if mixer.rule == "mamba":
        rest = low[:, None, rank + 2 * N :]  # of a token's own A
        A = -(p["A_log"][i] + rest).exp() if rest.shape[-1] else -p["A_log"][i].exp()
    channels = x.shape[-1]
    state = torch.zeros(len(low), channels, N, dtype=torch.float64)
    nothing = torch.zeros(len(low), channels, dtype=torch.float64)
    kept = []
    for n in range(N):
        one = state.clone()
        one[..., n] = 1
        kept.append(update(one, nothing, logit, key, A, True)[..., n])
    added = update(state, nothing + 1, logit, key, A, True)
    strength = (added * key[:, None]).sum(-1) / key.square().sum(-1, keepdim=True)
    return (1 - torch.stack(kept).mean((0, 2))).view(x.shape[:2]), strength.mean(1).view(x.shape[:2])


def plain_maps(model, images):
    """Forgetting and write strength, each (depth, B, 2, L), in float64 and with plain code."""
    found = []
    x, rows = model._embed(images)
    for block in model.blocks:
        p = dict(block.mixer.named_parameters())
        h = plain_norm(x, block.norm.weight)
        order = reading_order(block, rows, x.shape[1])
        back_to_rows = torch.argsort(order)
        h = h[:, order]
        inner = h @ p["in_proj.weight"][: p["D"].shape[1]].t()
        seen = x.shape[1] // rows if block.reads_columns else rows
        for_ahead, for_back = what_scans_read(p, inner, block.mixer, seen)
        ahead = back = measured(p, 0, for_ahead, block.mixer, seen)
        if block.mixer.wiring == "vim" or block.mixer.reversed:
            found_back = measured(p, len(p["D"]) - 1, for_back, block.mixer, seen, True)
            back = [value.flip(1) for value in found_back]
            ahead = back if block.mixer.reversed else ahead
        found.append([torch.stack(pair, 1)[..., back_to_rows] for pair in zip(ahead, back)])
        x = x + plain_mixer(p, h, block.mixer, seen)[:, back_to_rows]
    return [torch.stack(values) for values in zip(*found)]


OPTIONS = [
    dict(),
    dict(rule="exact"),
    dict(wiring="shared"),
    dict(wiring="shared", rule="exact"),
    dict(beta="scalar"),
    dict(name="vim_test"),
    dict(name="vim_test", wiring="shared"),
    dict(wiring="alternate"),
    dict(rule="exact", qk_norm=True),
    dict(scan_order="rows_columns"),
    dict(name="vim_test", beta="scalar"),
    dict(name="vim_test", A_per_token=True),
    *(dict(rule=rule) for rule in NAMES if rule not in ("diagonal", "exact", "mamba")),
    dict(patch_stride=(2, 4)),
    dict(class_token="first"),
    dict(class_token="last", name="vim_test"),
    dict(class_token="none", global_pool="avg"),
    dict(class_token="none", global_pool="avg", conv="grid", rope=True, d_state=4, scan_order="rows_columns"),
    dict(class_token="none", global_pool="avg", conv="grid", wiring="alternate"),
    dict(gate="none"),
    dict(gate="value"),
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())) or "default")
def test_maps_tell_what_a_step_does_to_the_state(options):
    model, images = small(**options), torch.randn(2, 3, 12, 20)
    maps = token_maps(model, images)
    rows, columns = {(2, 4): (5, 5)}.get(options.get("patch_stride"), (3, 5))
    index = {"first": 0, "last": rows * columns, "none": None}.get(options.get("class_token"), rows * columns // 2)
    double = model.double()
    double.residual_in_fp32 = False
    with torch.no_grad():
        expected = plain_maps(double, images.double())
    exact = token_maps(double, images.double())
    for field, right in zip(("forgetting", "write"), expected):
        of_class = None if index is None else right[..., index]
        patches = right[..., [i for i in range(right.shape[-1]) if i != index]].unflatten(-1, (rows, columns))
        assert getattr(maps, field).dtype == torch.float32
        if options.get("rule") != "gla" or field != "write":  # which writes every token as it is
            assert 0 < patches.min() and patches.std(-1).min() > 0  # there is something to get wrong
        torch.testing.assert_close(getattr(exact, field), patches, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(getattr(maps, field).double(), patches, rtol=1e-3, atol=1e-5)
        found = getattr(exact, f"class_{field}")
        assert found is None if index is None else torch.allclose(found, of_class, rtol=1e-9)


def test_maps_leave_the_model_as_it_was():
    model, images = small(dynamic_img_size=True), torch.randn(1, 3, 8, 24)
    before = model(images)
    model.set_grad_checkpointing()
    assert token_maps(model, images).write.shape == (DEPTH, 1, 2, 2, 6)
    with pytest.raises(AssertionError, match="dynamic_img_pad"):
        token_maps(model, torch.randn(1, 3, 9, 24))
    assert all(not block.mixer.in_proj._forward_hooks for block in model.blocks)
    assert torch.equal(model(images), before)


def test_maps_in_low_precision_are_those_of_full_precision():
    model, images = small(), torch.randn(2, 3, 12, 20)
    expected = token_maps(model, images)
    with torch.autocast("cpu", torch.bfloat16):
        maps = token_maps(model, images)
    for found, right in zip(maps[:4], expected[:4]):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, right, rtol=0.1, atol=0.02)


def test_another_model_is_named():
    with pytest.raises(UserError, match="not a Features"):
        token_maps(small(features_only=True), torch.randn(1, 3, 12, 20))


def colours(path, columns):
    """How many colours each fifth of a picture's width has."""
    with Image.open(path) as image:
        width = image.width // columns
        return [
            len(image.convert("RGB").crop((i * width, 0, (i + 1) * width, image.height)).getcolors(1 << 20))
            for i in range(columns)
        ]


def test_a_picture_of_chosen_blocks(tmp_path):
    maps = token_maps(small(), torch.randn(2, 3, 12, 20))
    image = torch.rand(12, 20, 3).numpy()
    plot_maps(maps, image, tmp_path / "sub" / "one.png", layers=[-1], sample=1)
    plot_maps(maps, image, tmp_path / "sub" / "all.png")
    sizes = [Image.open(tmp_path / "sub" / name).height for name in ("one.png", "all.png")]
    assert sizes[0] < sizes[1] and min(colours(tmp_path / "sub" / "all.png", 5)) > 10
    for layers in ([DEPTH], [-DEPTH - 1], []):
        with pytest.raises(UserError, match="blocks 0 to 1"):
            plot_maps(maps, image, tmp_path / "none.png", layers=layers)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["all.png", "one.png", "sub"]


@pytest.mark.parametrize(
    "options,arrows",
    [
        (dict(), ["→←", "→←", "→←", "→←"]),
        (dict(wiring="shared", scan_order="rows_columns"), ["→←", "↓↑", "→←", "↓↑"]),
        (dict(wiring="alternate"), ["→→", "←←", "→→", "←←"]),
        (dict(wiring="alternate", scan_order="rows_columns"), ["→→", "←←", "↓↓", "↑↑"]),
    ],
)
def test_arrows_say_which_way_each_block_reads(options, arrows, monkeypatch, tmp_path):
    maps = token_maps(small(depth=4, **options), torch.randn(1, 3, 12, 20))
    assert list(maps.arrows) == arrows
    drawn = []
    monkeypatch.setattr("vision_longhorn.evaluation.maps.save_png", lambda figure, *_, **__: drawn.append(figure))
    for layers in (None, [-1]):
        plot_maps(maps, torch.rand(12, 20, 3).numpy(), tmp_path / "maps.png", layers)
    for figure, of_blocks in zip(drawn, (arrows, arrows[-1:]), strict=True):
        titles = [axis.get_title() for axis in figure.axes]
        rows = [titles[5 * i : 5 * i + 5] for i in range(len(of_blocks))]
        for i, row in enumerate(rows):  # said once for blocks below each other that read alike
            ways = of_blocks[i]
            said = ["image", *(f"{quantity} {way}" for quantity in ("forgetting", "write") for way in ways)]
            assert row == (said if i == 0 or of_blocks[i - 1] != ways else [""] * 5)


@pytest.fixture
def run(tmp_path):
    cfg, _ = load_config(["--config", "demo_digits"])
    values = {**cfg.values(), "model_kwargs": dict(img_size=16, patch_size=4, embed_dim=8, depth=DEPTH)}
    torch.manual_seed(0)
    model = timm.create_model("vlonghorn_test", num_classes=10, **values["model_kwargs"])
    save_checkpoint(
        tmp_path / "best.pt", dict(arch="vlonghorn_test", num_classes=10, config=values, state_dict=model.state_dict())
    )
    return tmp_path


def test_command_draws_what_a_run_sees(run, capsys):
    Image.new("L", (30, 20), 200).save(run / "grey.png")
    main([str(run), str(run / "grey.png"), "--out", str(run / "maps.png"), "--layers", "-1"])
    assert capsys.readouterr().out == f"wrote {run / 'maps.png'}\n" and min(colours(run / "maps.png", 5)) > 10
    with pytest.raises(UserError, match="no checkpoint"):
        main([str(run / "none.pt"), str(run / "grey.png")])


def test_command_turns_a_photo_upright_as_training_does(run):
    upright = Image.linear_gradient("L").resize((40, 40))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored a quarter turn to the left
    upright.save(run / "upright.png")
    upright.transpose(Image.Transpose.ROTATE_90).save(run / "turned.png", exif=exif)
    for name in ("upright", "turned"):
        main([str(run), str(run / f"{name}.png"), "--out", str(run / f"{name}-maps.png"), "--layers", "0"])
    assert (run / "upright-maps.png").read_bytes() == (run / "turned-maps.png").read_bytes()


@pytest.mark.parametrize(
    "words,message",
    [
        (["none.png"], "none.png: No such file"),
        (["best.pt"], "best.pt: not a readable image"),
        (["grey.png", "--layers", "one"], "--layers: 'one'"),
        (["grey.png", "--layer", "1"], "--layers"),
        (["grey.png", "--out", "grey.png/maps.png"], "grey.png is no folder where you may write"),
    ],
)
def test_what_the_command_cannot_use_is_named(words, message, run, monkeypatch):
    monkeypatch.chdir(run)
    Image.new("L", (30, 20), 200).save("grey.png")
    with pytest.raises((OSError, UserError), match=message):
        main([".", *words])
    assert sorted(path.name for path in run.iterdir()) == ["best.pt", "grey.png"]


def test_the_delta_rule_takes_no_notice_of_a_zero_key():
    k = torch.tensor([0.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 3, 4)
    (forgotten,), (written,) = get_rule("delta").maps(torch.zeros(1, 2, 3, 8), k, None)
    assert not forgotten[0].any() and not written[0].any()
    torch.testing.assert_close(forgotten[1], torch.full((3,), 0.5 / 4))
    torch.testing.assert_close(written[1], torch.full((3,), 0.5 / 4))
