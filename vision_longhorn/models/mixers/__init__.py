"""Mixers: modules from (B, L, dim) to (B, L, dim) that take the place of a transformer's attention in a block.

A mixer is made by a class or function, which is called with the width of the tokens, and with as many of these keyword
arguments as it takes: `residual_layers` (branches that add up), `eps` (of norms), `device`, `dtype` and `index`
(of its block, from 0). All its other arguments are its options. Beside `forward`, the module may have

- `reset_parameters()`; without it, those of its parts are called,
- `NO_WEIGHT_DECAY`, names of parameters that no optimiser should decay,
- `describe()`, a few words for a model card,
- `needs_grid`, True if its tokens are patches whose grid it uses: `forward` is then given their number of rows as well,
  and the model has no class token,
- `forgetting_and_write(h)`, if it keeps a state that `vision_longhorn.maps` can show; it is given what `forward` is.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from torch import nn

from vision_longhorn.errors import nearest
from vision_longhorn.kernels.contract import check_option
from vision_longhorn.models.mixers.attention import GatedAttention
from vision_longhorn.models.mixers.gated_conv import GatedConv
from vision_longhorn.models.mixers.mamba2 import Mamba2Mixer
from vision_longhorn.models.mixers.state_space import BidirectionalMixer, mamba

Mixer: TypeAlias = str | Callable[..., nn.Module]  # a name below, or what makes the module

MIXERS: dict[str, Callable[..., nn.Module]] = {
    "longhorn": BidirectionalMixer,
    "mamba": mamba,
    "mamba2": Mamba2Mixer,
    "attention": GatedAttention,
    "conv": GatedConv,
}
GIVEN = ("residual_layers", "eps", "device", "dtype", "index")  # arguments that every mixer may take


def find_mixer(mixer: Mixer) -> Callable[..., nn.Module]:
    """Return the class or function that makes a mixer, which is given by its name or as it is."""
    if callable(mixer):
        return mixer
    check_option("mixer", mixer, tuple(MIXERS))
    return MIXERS[mixer]


def check_options(mixer: Mixer, options: Iterable[str], models_own: Iterable[str]) -> None:
    """Raise TypeError if a mixer does not take these options. It names the nearest one, also of the `models_own`."""
    parameters = inspect.signature(find_mixer(mixer)).parameters
    unknown = next((option for option in options if option not in parameters), None)
    if unknown is not None and not _takes_any(parameters):
        own = [option for option in [*parameters][1:] if option not in GIVEN]  # the first is the width
        near = nearest(unknown, (*own, *models_own))
        hint = f", the nearest known one is '{near[0]}'" if near else ""
        name = repr(mixer) if isinstance(mixer, str) else getattr(mixer, "__name__", type(mixer).__name__)
        raise TypeError(
            f"got an unexpected keyword argument '{unknown}'{hint}; beside the model's own, mixer={name} takes "
            f"{', '.join(own) or 'none'}"
        )


def _takes_any(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters.values())


def create_mixer(mixer: Mixer, dim: int, **options: Any) -> nn.Module:
    """Make the mixer of a block, `dim` wide, from its own options and those of `GIVEN` that it takes.

    Raises:
        ValueError: there is no mixer of this name, or an option's value is not known.
        TypeError: the mixer has no such option.
    """
    make = find_mixer(mixer)
    parameters = inspect.signature(make).parameters
    takes = [key for key in options if key in parameters or key not in GIVEN or _takes_any(parameters)]
    made = make(dim, **{key: options[key] for key in takes})
    return made.to(device=options.get("device"), dtype=options.get("dtype"))


def reset_mixer(mixer: Any) -> None:
    """Initialise a mixer, or a block with one, anew and in place. Raises TypeError if it has no way to do so."""
    if hasattr(mixer, "reset_parameters"):
        mixer.reset_parameters()
        return
    if next(mixer.parameters(recurse=False), None) is not None:
        raise TypeError(f"{type(mixer).__name__} has parameters but no reset_parameters() to initialise them")
    for part in mixer.children():
        reset_mixer(part)


def describe_mixer(mixer: Any) -> str:
    """Describe a mixer in a few words."""
    return str(mixer.describe()) if hasattr(mixer, "describe") else type(mixer).__name__
