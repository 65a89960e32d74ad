"""Downloads that go on where they were broken off, and are what they should be when they have a name."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Callable, Optional

import requests

#: Bytes at a time; what a broken connection brought of the last of these is lost.
CHUNK = 1 << 16
#: Seconds without a byte after which a connection counts as broken.
TIMEOUT = 30


class DownloadError(RuntimeError):
    """A file that could not be got, and what to do."""


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for chunk in iter(lambda: file.read(CHUNK), b""):
            digest.update(chunk)
    return digest.hexdigest()


def download(
    url: str,
    path: Path,
    *,
    size: Optional[int] = None,
    sha256: Optional[str] = None,
    attempts: int = 5,
    wait: float = 5.0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Gets a file; a second call after a break goes on from the bytes that are there.

    ``path`` exists when it is whole, with its SHA-256 beside it (``path.sha256``, as sha256sum writes it);
    until then the bytes are in ``path.part``.

    Args:
        url: http or https.
        path: the file to make; its folder is made too.
        size, sha256: what it must be, if known.
        attempts: connections in a row that may break without a single new byte.
        wait: seconds between these.
        progress: called with the bytes that are there and those of the whole file (0 if unknown).

    Raises:
        DownloadError: it cannot be got, or is not the file it should be.
        OSError: it cannot be written.
    """
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    idle = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _fetch(url, part, before, progress):
                break
            problem = "the connection broke off"
        except requests.RequestException as error:
            problem = str(error)
        grown = part.exists() and part.stat().st_size > before
        idle = 0 if grown else idle + 1
        if idle >= attempts:
            done = part.stat().st_size if part.exists() else 0
            raise DownloadError(
                f"{url} could not be got ({problem}); {done:,} bytes are kept: call this again to go on from "
                f"there, or put the file at {path} yourself"
            )
        time.sleep(0 if grown else wait)
    if size is not None and part.stat().st_size != size:
        found = part.stat().st_size
        part.unlink()
        raise DownloadError(
            f"{url} has {found:,} bytes instead of {size:,}: it is not the published file; call this "
            f"again, or put the file at {path} yourself"
        )
    digest = sha256_of(part)
    if sha256 is not None and digest != sha256:
        part.unlink()
        raise DownloadError(
            f"{url} is not the published file, its SHA-256 is {digest} instead of {sha256}; call this "
            f"again, or put the file at {path} yourself"
        )
    path.with_name(path.name + ".sha256").write_text(f"{digest}  {path.name}\n")
    os.replace(part, path)
    return path


def _fetch(url: str, part: Path, done: int, progress: Callable[[int, int], None]) -> bool:
    """One connection: appends to ``part``; whether the file is whole then.

    Raises:
        DownloadError: the server does not have it.
        requests.RequestException: the connection failed.
    """
    headers = {"Accept-Encoding": "identity"}  # lengths and ranges of the file itself
    if done:
        headers["Range"] = f"bytes={done}-"
    with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as answer:
        if answer.status_code == 416:  # nothing behind these bytes: they are all, or those of another file
            total = int(answer.headers.get("Content-Range", "*/0").rpartition("/")[2] or 0)
            if total == done:
                return True
            part.unlink()
            return False
        if 400 <= answer.status_code < 500:
            raise DownloadError(
                f"{url} is not there ({answer.status_code} {answer.reason}); get it elsewhere"
            )
        answer.raise_for_status()
        if answer.status_code != 206:  # the server starts again from the first byte
            done = 0
        total = int(answer.headers.get("Content-Length", 0))
        total = total + done if total else 0
        with open(part, "ab" if done else "wb") as out:
            for chunk in answer.iter_content(CHUNK):
                out.write(chunk)
                done += len(chunk)
                progress(done, total)
    return total == 0 or done == total
