"""Files that people name: read whole or refused in a line, written whole or not at all.

The name may lead to a pipe that nobody writes to, a device without an end, or a folder. Writing may
end in the middle (a full disk, Ctrl-C); the old file then stays as it was.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mesh_attention.errors import MeshAttentionError

_WITHOUT_WAITING = getattr(os, "O_NONBLOCK", 0)  # else to open a pipe waits for a writer


class FileError(MeshAttentionError):
    """A file that cannot be read as text."""


def read_text(path: Path | str, *, most_bytes: int) -> str:
    """Reads a regular file of at most `most_bytes`; anything else is a FileError."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | _WITHOUT_WAITING), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                what = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
                raise FileError(f"{path} is {what}, not a file")
            if status.st_size > most_bytes:
                raise FileError(f"{path} has {status.st_size} bytes; at most {most_bytes} are read")
            return file.read(most_bytes).decode("utf-8-sig")
    except OSError as error:
        raise FileError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not text: {error}") from error
    except ValueError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{str(path)!r} is not the name of a file: {error}") from error


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yields a new file beside `path` to write to, with the same suffix. It replaces `path` when
    the block ends; if that fails, it is gone and `path` is as it was. A pipe or a device (standard
    output too) is written to directly."""
    if _is_written_directly(Path(path)):
        with _has_reader(Path(path)):
            yield Path(path)
        return
    target = Path(os.path.realpath(path))
    part = target.parent / f".{secrets.token_hex(8)}{target.suffix}"
    try:
        if target.exists():
            target.open("r+b").close()  # a folder, or what may not be written, is not replaced
        yield part
        os.replace(part, target)
    except BaseException as error:
        with suppress(OSError):  # there may be no such file, or no such folder
            part.unlink()
        if isinstance(error, OSError) and error.filename in (str(part), str(target)):
            error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def _has_reader(path: Path) -> Iterator[None]:
    """To open a pipe that nobody reads would wait. Held open: its reader ends with the last who
    writes."""
    held = None
    try:
        if path.is_fifo():
            held = os.open(path, os.O_WRONLY | _WITHOUT_WAITING)
    except OSError as error:
        raise FileError(f"{path} is a pipe that cannot be written to: nobody reads it") from error
    try:
        yield
    finally:
        if held is not None:
            os.close(held)


class _CheckedError(Exception):
    """Ends a check before the file is replaced."""


def check_writable(path: Path | str) -> None:
    """Refuses now what `replacing` would refuse after long work."""
    if not _is_written_directly(Path(path)):
        with suppress(_CheckedError), replacing(path) as part:
            part.open("xb").close()
            raise _CheckedError


def _is_written_directly(path: Path) -> bool:
    odd = path.exists() and not path.is_file() and not path.is_dir()
    return odd or path.absolute().parts[1:2] in (("dev",), ("proc",))
