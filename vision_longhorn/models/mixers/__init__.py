"""What stands in a block where a transformer has attention: any module from (B, L, dim) to (B, L, dim), by name.

A mixer is called with the width of the tokens and the keyword arguments `residual_layers` (blocks whose outputs add
up), `eps` (of norms), `device` and `dtype`, and, if it takes it, `index` (of its block, from 0); whatever else it takes
are its options. Besides `forward` it has

- `reset_parameters()`,
- `NO_WEIGHT_DECAY`, names of parameters that no optimiser should decay,
- `describe()`, a few words for a model card,

and, if it keeps a state that `vision_longhorn.maps` can show, `forgetting_and_write(h)`.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from vision_longhorn.errors import nearest
from vision_longhorn.kernels.contract import check_option
from vision_longhorn.models.mixers.attention import GatedAttention
from vision_longhorn.models.mixers.state_space import BidirectionalMixer, mamba

MIXERS: dict[str, Callable[..., nn.Module]] = {
    "longhorn": BidirectionalMixer,
    "mamba": mamba,
    "attention": GatedAttention,
}


def check_options(name: str, options: Iterable[str], models_own: Iterable[str] = ()) -> None:
    """Raises where the mixer called `name` does not take these options.

    Args:
        name: Of the mixer.
        options: Names of arguments.
        models_own: Those that the model itself takes, which one of them may have been meant for.

    Raises:
        ValueError: there is no such mixer.
        TypeError: it has no such option.
    """
    check_option("mixer", name, tuple(MIXERS))
    taken = inspect.signature(MIXERS[name]).parameters
    unknown = next((option for option in options if option not in taken), None)
    if unknown is not None:
        given = ("dim", "residual_layers", "eps", "device", "dtype", "index")
        own = [option for option in taken if option not in given]
        near = nearest(unknown, (*own, *models_own))
        hint = f", the nearest known one is '{near[0]}'" if near else ""
        raise TypeError(
            f"got an unexpected keyword argument '{unknown}'{hint}; beside the model's own, mixer={name!r} takes "
            f"{', '.join(own)}"
        )


def create_mixer(name: str, dim: int, index: int = 0, **options: Any) -> nn.Module:
    """The mixer called `name`, of the block with this index.

    Raises:
        ValueError: there is none, or an option has a value that it does not know.
        TypeError: it has no such option.
    """
    check_options(name, options)
    if "index" in inspect.signature(MIXERS[name]).parameters:
        options["index"] = index
    return MIXERS[name](dim, **options)
