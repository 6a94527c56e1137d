"""From an image to what the model sees: timm's settings and transforms."""

from timm.data import auto_augment, create_transform, resolve_data_config

from vision_longhorn.errors import UserError, bad_input


def input_settings(model, values):
    """Input size, normalisation, resampling and crop, as `timm.data.create_transform` takes them for evaluation.

    Args:
        model: The timm model; its default_cfg fills in what `values` leaves open.
        values: Dict, such as a config's; read are mean, std, interpolation, crop_pct, and img_size of model_kwargs.

    Returns:
        Dict of keyword arguments, with input_size (3, height, width).

    Raises:
        UserError: For a model of another number of channels.
    """
    channels = (values.get("model_kwargs") or {}).get("in_chans", 3)
    if channels != 3:
        raise UserError(f"in_chans is {channels}: images are read in colour, with 3 channels; leave it out")
    wanted = {key: values.get(key) for key in ("mean", "std", "interpolation", "crop_pct")}
    size = (values.get("model_kwargs") or {}).get("img_size")
    if size is not None:
        wanted["input_size"] = (3, *size) if isinstance(size, (list, tuple)) else (3, size, size)
    return resolve_data_config(wanted, model=model)


def train_transform(settings, config):
    """timm's training transform: from a PIL image to a tensor (3, height, width).

    Args:
        settings: Dict of `input_settings`; the crop is for evaluation and not used.
        config: The `Config`.
    """
    for name in ("Posterize", "PosterizeIncreasing", "PosterizeOriginal"):
        auto_augment.NAME_TO_OP[name] = _posterize
    with bad_input(f"auto_augment={config.auto_augment}"):
        return create_transform(
            settings["input_size"], is_training=True, interpolation=settings["interpolation"], mean=settings["mean"],
            std=settings["std"], scale=config.scale, ratio=config.ratio, hflip=config.hflip,
            color_jitter=config.color_jitter, auto_augment=config.auto_augment, re_prob=config.re_prob,
            re_mode=config.re_mode,
        )


def _posterize(image, bits, **_):
    # At full magnitude timm keeps 0 bits. That is an error since Pillow 13, and was a black image before.
    return auto_augment.posterize(image, max(1, bits))
