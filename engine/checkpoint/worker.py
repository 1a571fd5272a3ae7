"""`python -m engine.checkpoint.worker`: the process that talks to the hub, one job at a time.

It is a process of its own so that a transfer which hangs, in whatever library, can be ended from outside. Jobs come as
lines of JSON on standard input, each is answered by one line on standard output; when standard input closes, the parent
is gone and so is this process.

Listing, metadata, redirects, credentials and error codes are huggingface_hub's, chunked storage is hf_xet's. The bytes
are written here, because huggingface_hub 1.x deletes the partial file of a download that ended early and begins again:
a part file only ever holds a prefix of its file, written in order, whatever the transport.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib
import json
import os
import queue
import re
import sys
import threading
from collections.abc import Iterator
from typing import IO, Any

CONNECT_SECONDS, READ_SECONDS = 15.0, 30.0


class Refused(Exception):
    """A job that failed: `kind` is denied, missing, retry, disk or contract; `text` is for a human.

    denied: 401 or 403. missing: 404, another revision, or nobody may be asked. retry: another attempt may succeed,
    after `wait` seconds where the server says so. disk: the part file cannot be written. contract: what came is not
    what a hub sends.
    """

    def __init__(self, kind: str, text: str, wait: float | None = None) -> None:
        self.kind, self.text, self.wait = kind, text, wait
        super().__init__(text)


def list_partition(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Every file of a partition as the hub describes it at a revision, after a HEAD of one small file.

    The HEAD comes first because a gated repository lists its files to everybody and refuses only their content.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.hf_api import RepoFile

    token = job["token"] or False
    url = hf_hub_url(job["repo"], job["probe"], revision=job["revision"], endpoint=job["endpoint"])
    metadata = get_hf_file_metadata(url, token=token, timeout=READ_SECONDS, endpoint=job["endpoint"])
    if metadata.commit_hash != job["revision"]:
        raise Refused("missing", f"it serves revision {metadata.commit_hash} instead of {job['revision']}")
    api = HfApi(endpoint=job["endpoint"], token=token, library_name="sol-h3")
    tree = api.list_repo_tree(job["repo"], job["partition"], recursive=True, revision=job["revision"])
    return [
        {
            "path": entry.path,
            "bytes": entry.lfs.size if entry.lfs else entry.size,
            "sha256": entry.lfs.sha256 if entry.lfs else None,
            "git_oid": None if entry.lfs else entry.blob_id,
            "xet_hash": entry.xet_hash,
        }
        for entry in tree
        if isinstance(entry, RepoFile)
    ]


def transfer(job: dict[str, Any]) -> None:
    """Append to a part file until it has the job's size. Bytes that are there already are not asked for again."""
    with open(job["part"], "ab", buffering=0) as part:
        with contextlib.suppress(OSError):  # a network file system without locks
            fcntl.flock(part, fcntl.LOCK_EX)  # a worker of a killed parent may still be writing its last chunk
        offset = os.fstat(part.fileno()).st_size
        if offset > job["bytes"]:
            part.truncate(0)
            offset = 0
        if offset < job["bytes"]:
            chunks = over_xet(job, offset) if job["transport"] == "xet" else over_http(job, part, offset)
            append(part, chunks, job["bytes"])
        os.fsync(part.fileno())


def append(part: IO[bytes], chunks: Iterator[bytes], size: int) -> None:
    """Write chunks as they come; a file that would become longer than it is, or stays shorter, is refused."""
    for chunk in chunks:
        if os.fstat(part.fileno()).st_size + len(chunk) > size:
            part.truncate(0)
            raise Refused("contract", f"more than {size} bytes came")
        view = memoryview(chunk)
        while view:
            view = view[part.write(view) :]
    found = os.fstat(part.fileno()).st_size
    if found < size:
        raise Refused("retry", f"the transfer ended after {found} of {size} bytes")


def over_http(job: dict[str, Any], part: IO[bytes], offset: int) -> Iterator[bytes]:
    """The file's bytes from `offset` on. A server that ignores or refuses the range makes the part begin anew."""
    from huggingface_hub import get_session, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    headers = build_hf_headers(token=job["token"] or False, library_name="sol-h3")
    headers["Accept-Encoding"] = "identity"
    if offset:
        headers["Range"] = f"bytes={offset}-"
    url = hf_hub_url(job["repo"], job["path"], revision=job["revision"], endpoint=job["endpoint"])
    # On a redirect to another host httpx drops the Authorization header, so a storage host never sees the token.
    with get_session().stream("GET", url, headers=headers, timeout=timeouts()) as response:
        if response.status_code == 416:
            part.truncate(0)
            raise Refused("retry", "the server refused to resume (416)")
        hf_raise_for_status(response)
        if response.status_code == 206:
            check_range(response.headers.get("Content-Range", ""), offset, job["bytes"])
        elif offset:
            part.truncate(0)
        yield from response.iter_raw()


def check_range(header: str, offset: int, size: int) -> None:
    """Refuse a partial answer that does not begin where the part file ends."""
    match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", header)
    if match is None or int(match[1]) != offset or match[3] not in (str(size), "*"):
        raise Refused("contract", f"asked for bytes from {offset} of {size}, the server answered {header!r}")


def over_xet(job: dict[str, Any], offset: int) -> Iterator[bytes]:
    """The file's bytes from `offset` on, in order, out of the hub's chunk storage."""
    from hf_xet import XetFileInfo, XetSession
    from huggingface_hub.utils import build_hf_headers

    route = f"{job['endpoint']}/api/models/{job['repo']}/xet-read-token/{job['revision']}"
    headers = build_hf_headers(token=job["token"] or False, library_name="sol-h3")
    group = XetSession().new_download_stream_group(token_refresh_url=route, token_refresh_headers=headers)
    yield from group.download_stream(XetFileInfo(job["xet_hash"], job["bytes"]), start=offset)


def timeouts() -> Any:
    """httpx's time limits of one request; the parent's watchdog is the limit of the whole."""
    import httpx

    return httpx.Timeout(READ_SECONDS, connect=CONNECT_SECONDS)


def refusal(error: Exception) -> Refused:
    """What an exception of any of the libraries means for the job."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        return Refused("disk", error.strerror or str(error))
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    if type(error).__name__ == "OfflineModeIsEnabled":
        return Refused("missing", "HF_HUB_OFFLINE is set, so nothing was asked")
    if status in (401, 403):
        return Refused("denied", f"HTTP {status}")
    if status in (404, 410):
        return Refused("missing", f"HTTP {status}")
    wait = retry_after(response.headers.get("Retry-After", "")) if response is not None else None
    return Refused("retry", f"HTTP {status}" if status else text, wait)


def retry_after(header: str) -> float | None:
    """Seconds of a Retry-After header, given as a number or as a date."""
    import email.utils
    import time

    if header.strip().isdigit():
        return float(header)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(header).timestamp() - time.time())
    except ValueError:
        return None


def jobs() -> Iterator[dict[str, Any]]:
    """Jobs from standard input. Its end is the parent's end: the process stops at once, whatever it is doing."""
    waiting: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(waiting.get())


def do(job: dict[str, Any]) -> list[dict[str, Any]]:
    """One job of either kind; a transfer has nothing to say but that it is done."""
    if job["do"] == "list":
        return list_partition(job)
    transfer(job)
    return []


def main() -> None:
    """Say that the libraries are loaded, then answer jobs until standard input closes."""
    for library in ("huggingface_hub", "httpx", "hf_xet"):
        with contextlib.suppress(ImportError):  # the job that needs it says so
            importlib.import_module(library)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for job in jobs():
        try:
            answer: dict[str, Any] = {"result": do(job)}
        except Exception as error:  # hf_xet raises whatever it likes; the parent decides what a failure means
            refused = refusal(error)
            answer = {"refused": refused.kind, "text": refused.text, "wait": refused.wait}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
