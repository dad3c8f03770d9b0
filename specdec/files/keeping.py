"""Files that specdec keeps: replaced as a whole, and trusted only where no other user may write."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

_LINKS = 40  # symbolic links on a path, as in Linux


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """A new file beside ``path``, which takes its place when the block ends without an error.

    The contents reach the disk before the rename, so a crash or a power cut leaves the old file or the new one.

    Args:
        mode: permissions of the new file, as far as the process's umask allows them.
    Raises: OSError; ValueError when ``path`` cannot be a file's name.
    """
    new = path.parent / f".specdec-{secrets.token_hex(8)}.tmp"  # not after path: its name may be as long as names get
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
    try:
        yield new
        _flush(new)
        os.replace(new, path)
        with contextlib.suppress(OSError):  # some systems cannot flush a folder; the file is in place
            _flush(path.parent)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(new)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, writable by this user alone whatever the umask. Raises: OSError."""
    if not folder.is_dir():
        if folder.parent != folder:
            make_folder(folder.parent)
        folder.mkdir(mode=0o755, exist_ok=True)


def exposed(path: Path) -> str | None:
    """Why another user could have written ``path``, or could exchange it; None if none can.

    Everything on the way to ``path`` must belong to this user or to root and be writable by its owner alone. A sticky
    folder such as /tmp may be writable by all, because only the owner of an entry can exchange it there. Links are
    followed by hand, so those of another user count.

    Raises: OSError when ``path`` or a folder above it does not exist or cannot be examined.
    Source: Kupsch and Miller 2008, "How to Open a File and Not Get Hacked".
    """
    if not path.is_absolute():
        return f"{path} is a relative path, so it depends on the folder in which specdec was started"
    at, left, links = Path(path.anchor), list(reversed(path.parts[1:])), 0
    while True:
        state = os.lstat(at)
        if state.st_uid not in (0, os.geteuid()):
            return f"{at} belongs to another user"
        if stat.S_ISLNK(state.st_mode):
            links += 1
            if links > _LINKS:
                return f"{path} leads through more than {_LINKS} links"
            target = Path(os.readlink(at))
            left += reversed(target.parts[1:] if target.is_absolute() else target.parts)
            at = Path(target.anchor) if target.is_absolute() else at.parent
            continue
        sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX and left
        others = stat.S_IWOTH if _has_own_group(state.st_gid) else stat.S_IWOTH | stat.S_IWGRP
        if state.st_mode & others and not sticky:
            return f"{at} can be written by other users"
        if not left:
            return None
        part = left.pop()
        at = at.parent if part == ".." else at / part


@functools.cache
def _has_own_group(group: int) -> bool:
    """Whether this user alone is in a group: some systems give every user one, and let it write what the user creates.

    Never for root, whose group has other members in some systems.
    """
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    own = user.pw_uid != 0 and user.pw_gid == group and found.gr_name == user.pw_name
    return own and set(found.gr_mem) <= {user.pw_name}
