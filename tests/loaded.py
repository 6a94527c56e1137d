"""Loads Numba and its loops. A server of processes imports this file, so that each run that it forks starts a second
sooner."""

import torch

from vision_longhorn.models.mixers import BidirectionalMixer

torch.set_num_threads(1)  # a fork would wait for threads that its parent alone has
with torch.no_grad():
    BidirectionalMixer(8)(torch.zeros(1, 2, 8))
