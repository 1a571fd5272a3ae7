"""A hub for tests: a real HTTP server that speaks what huggingface_hub asks, and misbehaves on request.

Two servers, as on the real hub: the hub itself, and a storage host that large files are redirected to. The hub also
plays the chunk storage that hf_xet talks to (reconstructions, and xorbs of uncompressed chunks).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

REPO, REVISION = "MiniMaxAI/MiniMax-H3", "b" * 40
CHUNK, CHUNK_HEADER = 40_000, 8
"""Bytes of a chunk, and of the header before each in a xorb: version, length, scheme, unpacked length."""


@dataclass
class Fault:
    """What goes wrong at one GET of a file's content (or HEAD, or listing): `kind` with its number or headers."""

    kind: str
    number: int = 0
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Asked:
    """One request as it came."""

    server: str
    method: str
    path: str
    start: int
    authorization: str | None
    sent: int = 0


class Hub:
    """Files, faults and what was asked. `faults[path]` are used up one a request; `always[path]` stay."""

    def __init__(self, files: dict[str, bytes], *, small: tuple[str, ...] = (), xet: str = "") -> None:
        self.files, self.small = files, small
        self.xet = xet  # "": none; "serve": it works; "hang", "refuse", or a place where nobody answers
        self.faults: dict[str, list[Fault]] = {}
        self.always: dict[str, Fault] = {}
        self.asked: list[Asked] = []
        self.bytes_a_second = 0
        self.revision = REVISION
        self.token = ""
        self.endpoint = self.storage = ""
        self.released = threading.Event()

    def fault(self, path: str) -> Fault | None:
        if self.faults.get(path):
            return self.faults[path].pop(0)
        return self.always.get(path)

    def gets(self, path: str) -> list[Asked]:
        """Content requests for a file, on whichever server ends up sending bytes."""
        return [asked for asked in self.asked if asked.method == "GET" and asked.path == path and asked.sent >= 0]

    def sha256(self, path: str) -> str:
        return hashlib.sha256(self.files[path]).hexdigest()

    def tree(self) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "FL2VA"}]
        for path, data in self.files.items():
            oid = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            entry: dict[str, Any] = {"type": "file", "oid": oid, "size": len(data), "path": path}
            if path not in self.small:
                entry["lfs"] = {"oid": self.sha256(path), "size": len(data), "pointerSize": 134}
                if self.xet:
                    entry["xetHash"] = self.sha256(path)
            out.append(entry)
        return out


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub
    name: str

    def log_message(self, *arguments: object) -> None: ...

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.plain(200, {})

    def answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        try:
            if path.startswith("/api/") and "/tree/" in path:
                self.listing(path.rpartition("/tree/")[2].partition("/")[2])
            elif "xet-read-token" in path:
                self.xet_token()
            elif path.startswith("/v1/reconstructions/"):
                self.reconstruction(path.rsplit("/", 1)[1])
            elif path.startswith("/xorb/"):
                self.xorb(path.rsplit("/", 1)[1])
            elif match := re.fullmatch(rf"/{REPO}/resolve/([0-9a-f]+)/(.*)", path):
                self.resolve(match[2])
            elif match := re.fullmatch(rf"/api/resolve-cache/models/{REPO}/([0-9a-f]+)/(.*)", path):
                self.small(match[2])
            elif path.startswith("/blob/"):
                self.content(path.removeprefix("/blob/"), redirected=True)
            else:
                self.plain(404, {"X-Error-Code": "EntryNotFound"})
        except (BrokenPipeError, ConnectionResetError):
            pass

    def note(self, path: str, sent: int = -1) -> Asked:
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(match[1]) if match else 0
        asked = Asked(self.name, self.command, path, start, self.headers.get("Authorization"), sent)
        self.hub.asked.append(asked)
        return asked

    def plain(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def denied(self) -> bool:
        if not self.hub.token or self.headers.get("Authorization") == f"Bearer {self.hub.token}":
            return False
        self.plain(401, {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to model is restricted"})
        return True

    def broken(self, fault: Fault | None) -> bool:
        if fault is not None and fault.kind == "status":
            self.plain(fault.number, fault.headers)
            return True
        if fault is not None and fault.kind == "hang":
            self.hub.released.wait(30)
            self.close_connection = True
            return True
        if fault is not None and fault.kind == "drop":  # as from a server that has just gone
            self.close_connection = True
            self.connection.close()
            return True
        return False

    def listing(self, folder: str) -> None:
        """Of the folder that is asked for alone, as the hub does."""
        self.note("listing")
        if not self.broken(self.hub.fault("listing")):
            found = [entry for entry in self.hub.tree() if entry["path"].startswith(f"{folder}/" if folder else "")]
            self.plain(200, {"Content-Type": "application/json"}, json.dumps(found).encode())

    def xet_token(self) -> None:
        self.note("xet")
        if self.hub.xet == "hang":
            self.hub.released.wait(30)
            self.close_connection = True
        elif self.hub.xet == "refuse":
            self.plain(500, {})
        else:
            place = self.hub.endpoint if self.hub.xet == "serve" else self.hub.xet
            access = {"accessToken": "t", "exp": int(time.time()) + 3600, "casUrl": place}
            self.plain(200, {"Content-Type": "application/json"}, json.dumps(access).encode())

    def by_hash(self, digest: str) -> tuple[str, bytes]:
        return next((path, data) for path, data in self.hub.files.items() if self.hub.sha256(path) == digest)

    def reconstruction(self, digest: str) -> None:
        """Which chunks of which xorb hold a range of a file. Each file is a xorb of its own here."""
        path, data = self.by_hash(digest)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        self.note(f"xet {path}").start = first
        begin, end = first // CHUNK, min(last, len(data) - 1) // CHUNK + 1
        place = {"start": begin * (CHUNK + CHUNK_HEADER), "end": end * CHUNK_HEADER + min(end * CHUNK, len(data)) - 1}
        span = {"start": begin, "end": end}
        term = {"hash": digest, "unpacked_length": min(end * CHUNK, len(data)) - begin * CHUNK, "range": span}
        info = {"range": span, "url": f"{self.hub.endpoint}/xorb/{digest}", "url_range": place}
        answer = {"offset_into_first_range": first - begin * CHUNK, "terms": [term], "fetch_info": {digest: [info]}}
        self.plain(200, {"Content-Type": "application/json"}, json.dumps(answer).encode())

    def xorb(self, digest: str) -> None:
        path, data = self.by_hash(digest)
        fault = self.hub.fault(f"xorb {path}")
        if fault is not None and fault.kind == "corrupt":
            data = bytes(byte ^ 0xFF for byte in data)
        pieces = [data[begin : begin + CHUNK] for begin in range(0, len(data), CHUNK)]
        whole = b"".join(b"\0%b\0%b%b" % (*[len(piece).to_bytes(3, "little")] * 2, piece) for piece in pieces)
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        body = whole[first : last + 1]
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {first}-{last}/{len(whole)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if fault is not None and fault.kind == "hang":
            self.wfile.write(body[: fault.number])
            self.wfile.flush()
            self.hub.released.wait(30)
            self.close_connection = True
        else:
            self.wfile.write(body)

    def resolve(self, path: str) -> None:
        if self.denied():
            self.note(path)
            return
        if path not in self.hub.files:
            self.note(path)
            self.plain(404, {"X-Error-Code": "EntryNotFound"})
            return
        if path in self.hub.small:  # as the hub does: to another path of its own, which is not absolute
            cached = f"/api/resolve-cache/models/{REPO}/{self.hub.revision}/{path}"
            self.plain(307, {**self.described(path), "Location": cached})
            return
        size = str(len(self.hub.files[path]))
        headers = {**self.described(path), "X-Linked-ETag": f'"{self.hub.sha256(path)}"', "X-Linked-Size": size}
        self.note(path)
        if self.command != "HEAD" or not self.broken(self.hub.fault(f"HEAD {path}")):
            self.plain(302, {**headers, "Location": f"{self.hub.storage}/blob/{path}"})

    def described(self, path: str) -> dict[str, str]:
        return {"X-Repo-Commit": self.hub.revision, "ETag": f'"{self.hub.sha256(path)[:40]}"'}

    def small(self, path: str) -> None:
        if self.denied():
            self.note(path)
        elif self.command != "HEAD":
            self.content(path, redirected=False)
        else:
            self.note(path)
            if not self.broken(self.hub.fault(f"HEAD {path}")):
                self.plain(200, self.described(path))

    def content(self, path: str, *, redirected: bool) -> None:
        asked = self.note(path, 0)
        fault = self.hub.fault(path)
        if self.broken(fault):
            return
        kind, number = (fault.kind, fault.number) if fault else ("", 0)
        data = self.hub.files[path]
        if kind == "corrupt":
            data = bytes(byte ^ 0xFF for byte in data[: number + 1]) + data[number + 1 :]
        if kind == "long":
            data = data + b"x" * 1000
        if kind == "short":
            data = data[:number]
        start = 0 if kind == "ignore range" else asked.start
        if start and start >= len(data):
            self.plain(416, {"Content-Range": f"bytes */{len(data)}"})
            return
        body = data[start:]
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body)))
        if start:
            first = start + 1 if kind == "wrong range" else start
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        self.send(asked, body[:number] if kind == "cut" else body, kind)
        if kind == "cut":
            self.close_connection = True
            self.connection.close()

    def send(self, asked: Asked, body: bytes, kind: str) -> None:
        if kind == "trickle":
            for byte in body:
                self.wfile.write(bytes([byte]))
                asked.sent += 1
                if self.hub.released.wait(0.05):
                    return
        rate = self.hub.bytes_a_second
        piece = rate // 50 if rate else len(body) or 1
        for begin in range(0, len(body), piece):
            self.wfile.write(body[begin : begin + piece])
            asked.sent += len(body[begin : begin + piece])
            if rate:
                time.sleep(0.02)


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def handle_error(self, request: object, client_address: object) -> None: ...


@contextmanager
def serving(hub: Hub) -> Iterator[Hub]:
    """Serve a hub on 127.0.0.1 and its storage on localhost: another host to a client."""
    servers = []
    for name in ("hub", "storage"):
        handler = type("Bound", (Handler,), {"hub": hub, "name": name})
        server = Server(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
    hub.endpoint = f"http://127.0.0.1:{servers[0].server_address[1]}"
    hub.storage = f"http://localhost:{servers[1].server_address[1]}"
    try:
        yield hub
    finally:
        hub.released.set()
        for server in servers:
            server.shutdown()
            server.server_close()
