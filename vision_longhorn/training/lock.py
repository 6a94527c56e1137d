"""One writer for a run's folder, over processes and, where the file system can do that, over machines."""

import errno
import os
import socket
import sys
from pathlib import Path

from vision_longhorn.errors import UserError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

NAME = "run.lock"


class RunLock:
    """Holds the folder of a run for this process until `release`, or until the process ends, however it ends.

    The lock is the system's, on the file run.lock, whose text names host and process of its holder for people. POSIX
    locks are used, which NFS and most cluster file systems pass on to other machines, and which a process that was
    forked does not inherit. The file stays when the lock is gone.

    Args:
        folder: Folder of the run; it has to exist.

    Attributes:
        note: Why the folder could not be locked, on a file system that knows no locks; else None.

    Raises:
        UserError: Where another process holds it, or it is a file.
    """

    def __init__(self, folder: str | Path) -> None:
        self.note: str | None = None
        path = Path(folder, NAME)
        if path.parent.is_file():
            raise UserError(f"{folder} is a file: name a folder for the run")
        self._file = open(path, "a+", encoding="utf-8")
        try:
            if sys.platform == "win32":
                self._file.seek(1 << 30)  # beyond the text, which others may read
                msvcrt.locking(self._file.fileno(), msvcrt.LK_NBLCK, 1)
            else:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN, errno.EDEADLK):
                self.note = f"{path} cannot be locked ({error.strerror}): see to it that no other process writes there"
                return
            self._file.close()
            holder = path.read_text(encoding="utf-8").strip() or "another process"
            raise UserError(
                f"{folder} is being written by {holder}: end that one first, it saves on SIGTERM; if that "
                f"machine is gone, remove {path}"
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()

    def release(self) -> None:
        """Lets others have the folder."""
        self._file.close()
