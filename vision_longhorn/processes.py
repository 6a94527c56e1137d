"""What one of several processes knows of the others, when it fails or they do."""

import contextlib
import os
import socket
import sys
import threading


def is_one_of_several() -> bool:
    """Whether a launcher started more processes than this one. (accelerate says so, too, where it was mpirun.)"""
    count = os.environ.get("WORLD_SIZE", "")
    return count.isdigit() and int(count) > 1


def has_lost_another(error: Exception) -> bool:
    """Whether an error only says that another process no longer answers."""
    distributed = sys.modules.get("torch.distributed")
    kinds = tuple(filter(None, (getattr(distributed, name, None) for name in ("DistBackendError", "DistNetworkError"))))
    return isinstance(error, kinds) or isinstance(error, RuntimeError) and "gloo/transport" in str(error)


def is_first_to_fail() -> bool:
    """Notes with the group of processes, if there is one yet, that this one fails, and tells whether it is the first.

    Where the process that keeps the group's notes has gone itself, nobody knows.
    """
    answers: list[int] = []

    def ask() -> None:
        with contextlib.suppress(Exception):
            # Where whoever keeps the notes has gone, torch would print its C++ frames: so a look at the address first.
            place = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            socket.create_connection(place, timeout=1).close()
            store = sys.modules["torch.distributed.distributed_c10d"]._get_default_store()
            answers.append(store.add("vision_longhorn_failures", 1))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(5)  # without the network there is no answer
    return answers in ([], [1])
