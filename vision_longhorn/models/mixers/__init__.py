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
from collections.abc import Callable
from typing import Any

from torch import nn

from vision_longhorn.kernels.contract import check_option
from vision_longhorn.models.mixers.attention import GatedAttention
from vision_longhorn.models.mixers.state_space import BidirectionalMixer, mamba

MIXERS: dict[str, Callable[..., nn.Module]] = {
    "longhorn": BidirectionalMixer,
    "mamba": mamba,
    "attention": GatedAttention,
}


def create_mixer(name: str, dim: int, index: int = 0, **options: Any) -> nn.Module:
    """The mixer called `name`, of the block with this index.

    Raises:
        ValueError: there is none, or an option has a value that it does not know.
        TypeError: it has no such option.
    """
    check_option("mixer", name, tuple(MIXERS))
    taken = inspect.signature(MIXERS[name]).parameters
    unknown = next((option for option in options if option not in taken), None)
    if unknown is not None:
        given = ("dim", "residual_layers", "eps", "device", "dtype", "index")
        own = [option for option in taken if option not in given]
        raise TypeError(
            f"got an unexpected keyword argument '{unknown}'; beside the model's own, mixer={name!r} takes "
            f"{', '.join(own)}"
        )
    if "index" in taken:
        options["index"] = index
    return MIXERS[name](dim, **options)
