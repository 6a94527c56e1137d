"""One writer for a folder, over processes and, where the file system can do that, over machines."""

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


class FolderLock:
    """Holds an existing folder for this process until `release`, or until the process ends, however it ends.

    The lock is the system's, on the file run.lock, whose text names the process and its host for people. NFS and most
    cluster file systems pass POSIX locks on to other machines, and a forked process does not inherit them. The file
    stays when the lock is gone. On a file system without locks, `note` says that the folder could not be locked.

    Raises:
        UserError: Where another process holds the folder, or it is a file.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.note: str | None = None
        path = Path(folder, NAME)
        if path.parent.is_file():
            raise UserError(f"{folder} is a file: name a folder for the run")
        self._file = open(path, "a+", encoding="utf-8")
        try:
            if sys.platform == "win32":
                self._file.seek(1 << 30)  # behind the text, so that others may read that
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
