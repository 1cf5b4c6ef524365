"""A server on this machine that speaks the Hub's HTTP API over real sockets, keeps what it is given, and can misbehave.

It answers what `huggingface_hub` asks for with `HF_HUB_DISABLE_XET=1`: create, branch, auth-check, validate-yaml,
preupload, the LFS batch, PUT and verify, commit, model info, tree and resolve. Every request is kept in `requests`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

import huggingface_hub.constants
import pytest

NUM_BYTES_OF_A_REGULAR_FILE = 4096  # larger ones and safetensors go through LFS
Files = dict[str, bytes]


@dataclass
class Fault:
    """What goes wrong with the next `times` requests whose method and path match.

    Attributes:
        method, path: of the request; `path` is searched for as a regular expression.
        status: answered instead of serving, with `text` as the server's message.
        delay_s: waited before serving.
        cut: the connection is reset in the middle of what the client sends (PUT, POST) or receives (GET).
        damaged: one bit is turned over in what is stored (PUT) or sent (GET).
        call: called before serving.
        lacks: a key that is left out of the answer.
    """

    method: str
    path: str
    times: int = 1
    status: int = 0
    text: str = "Injected."
    delay_s: float = 0.0
    cut: bool = False
    damaged: bool = False
    call: Callable[[], None] | None = None
    lacks: str = ""

    def matches(self, method: str, path: str) -> bool:
        return self.times > 0 and method == self.method and bool(re.search(self.path, path))


@dataclass(frozen=True)
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Repository:
    """`commits` holds all files of each commit, the newest last; a commit's name is 40 hex digits."""

    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    branches: dict[str, str] = field(default_factory=dict)  # name -> its newest commit

    def add(self, files: Files, message: str, branch: str = "main") -> str:
        name = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[name] = files
        self.messages.append(message)
        self.branches[branch] = name
        return name

    def find(self, revision: str) -> str:
        name = self.branches.get(revision, revision)
        if name not in self.commits:
            raise _Refusal(404, f"Revision {revision} not found", "RevisionNotFound")
        return name

    @property
    def files(self) -> Files:
        return self.commits[self.branches["main"]]


class HubServer:
    """The server as a context manager: `with HubServer(token) as hub: HfApi(endpoint=hub.url, token=token)`."""

    def __init__(self, token: str, user: str = "me"):
        self.token = token
        self.user = user
        self.can_write = True  # what the token may do with repositories that are there
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}  # LFS, by the sha256 that the client named
        self.requests: list[Request] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> HubServer:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def count(self, method: str, path: str) -> int:
        """How many requests of this method there were whose path matches."""
        return sum(r.method == method and bool(re.search(path, r.path)) for r in self.requests)

    def take_fault(self, request: Request) -> Fault | None:
        with self.lock:
            self.requests.append(request)
            fault = next((f for f in self.faults if f.matches(request.method, request.path)), None)
            if fault is not None:
                fault.times -= 1
            return fault


@contextmanager
def serve_hub(monkeypatch: pytest.MonkeyPatch, token: str) -> Iterator[HubServer]:
    """A server that this process, and those it starts, take for the Hub; the tests are offline otherwise."""
    with HubServer(token) as hub:
        # What environment variables said when the tests began.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        for name, value in {"HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "HF_ENDPOINT": hub.url}.items():
            monkeypatch.setenv(name, value)
        yield hub


def find_token(token: str, hub: HubServer, folder: Path, *texts: str) -> list[str]:
    """Where the token is though it must not be: what the server keeps and was sent, files below `folder`, texts.

    The header that carries it is where it belongs.
    """
    secret = token.encode()
    commits = [(name, files) for repo in hub.repositories.values() for name, files in repo.commits.items()]
    kept = {f"{commit[:7]}:{name}": content for commit, files in commits for name, content in files.items()}
    sent = {f"request {i}": r.path.encode() + r.body for i, r in enumerate(hub.requests)}
    local = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    told = {f"text {i}": text.encode() for i, text in enumerate(texts)}
    everything = {**kept, **hub.objects, **sent, **local, **told}
    return [name for name, content in everything.items() if secret in content]


class _Refusal(Exception):
    def __init__(self, status: int, message: str, code: str = ""):
        super().__init__(message)
        self.status, self.code = status, code


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    fault: Fault | None
    protocol_version = "HTTP/1.1"
    # One segment per answer: without it Nagle's algorithm holds a body back for 40 ms.
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: object) -> None:
        """Nothing is printed; `HubServer.requests` has it all."""

    def do_POST(self) -> None:
        with suppress(BrokenPipeError):  # of a client that waits no longer
            self._serve()

    do_GET = do_PUT = do_HEAD = do_POST

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        length = int(self.headers.get("Content-Length", 0))
        cut = next((f for f in self.hub.faults if f.cut and f.matches(self.command, path)), None)
        body = self.rfile.read(length // 2 if cut and self.command != "GET" else length)
        self.fault = self.hub.take_fault(Request(self.command, path, dict(self.headers), body))
        if self.fault is not None:
            time.sleep(self.fault.delay_s)
            if self.fault.call is not None:
                self.fault.call()
            if self.fault.cut and self.command != "GET":
                return self._reset()
        try:
            if self.fault is not None and self.fault.status:
                raise _Refusal(self.fault.status, self.fault.text)
            self._route(path, body)
        except _Refusal as refusal:
            self._send_json({"error": str(refusal)}, refusal.status, {"X-Error-Code": refusal.code})

    def _route(self, path: str, body: bytes) -> None:
        for method, pattern, serve in _ROUTES:
            found = re.fullmatch(pattern, path)
            if found and method == self.command:
                # As on the Hub, the address of an object is signed and carries no token.
                if serve is not _put_object and self.headers.get("Authorization") != f"Bearer {self.hub.token}":
                    raise _Refusal(401, "Invalid credentials in Authorization header")
                with self.hub.lock:
                    answer = serve(self.hub, *found.groups(), body=body, damaged=self._is_damaged())
                if self.fault is not None and self.fault.lacks:
                    del answer[self.fault.lacks]
                return self._send_file(*answer) if isinstance(answer, tuple) else self._send_json(answer)
        raise _Refusal(404, f"No such page: {self.command} {path}", "EntryNotFound")

    def _is_damaged(self) -> bool:
        return self.fault is not None and self.fault.damaged

    def _send_json(self, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        content = json.dumps(answer).encode()
        self._send_head(status, {"Content-Type": "application/json", **(headers or {})}, len(content))
        self.wfile.write(b"" if self.command == "HEAD" else content)

    def _send_file(self, commit: str, content: bytes) -> None:
        headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
        self._send_head(200, headers, len(content))
        if self.command == "HEAD":
            return None
        if self.fault is not None and self.fault.cut:
            self.wfile.write(content[: len(content) // 2])
            return self._close()
        self.wfile.write(_damage(content) if self._is_damaged() else content)

    def _send_head(self, status: int, headers: dict[str, str], length: int) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(length)}.items():
            self.send_header(name, value)
        self.end_headers()

    def _reset(self) -> None:
        # Lingering for 0 seconds makes closing a reset (RST), as a router or a load balancer does it.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._close()

    def _close(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _damage(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


def _create(hub: HubServer, *, body: bytes, damaged: bool) -> dict:
    asked = json.loads(body)
    repo_id = f"{asked.get('organization') or hub.user}/{asked['name']}"
    url = f"{hub.url}/{repo_id}"
    if repo_id in hub.repositories:
        return {"url": url}  # the Hub says 409 where the client did not ask for exist_ok, which it always does here
    private = asked.get("visibility") == "private" or asked.get("private") is True
    repository = hub.repositories[repo_id] = Repository(private)
    repository.add({".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
    return {"url": url}


def _validate_yaml(hub: HubServer, *, body: bytes, damaged: bool) -> dict:
    return {"errors": [], "warnings": []}


def _find(hub: HubServer, repo_id: str) -> Repository:
    if repo_id not in hub.repositories:
        raise _Refusal(404, f"Repository {repo_id} not found", "RepoNotFound")
    return hub.repositories[repo_id]


def _is_large(name: str, size: int) -> bool:
    return size > NUM_BYTES_OF_A_REGULAR_FILE or name.endswith(".safetensors")


def _git_hash(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _branch(hub: HubServer, repo_id: str, branch: str, *, body: bytes, damaged: bool) -> dict:
    branches = _find(hub, repo_id).branches
    if branch in branches:
        raise _Refusal(409, f"Branch {branch} is there")
    branches[branch] = branches["main"]
    return {}


def _may_write(hub: HubServer, repo_id: str, *, body: bytes, damaged: bool) -> dict:
    _find(hub, repo_id)
    if not hub.can_write:
        raise _Refusal(403, "This token may only read")
    return {}


def _preupload(hub: HubServer, repo_id: str, revision: str, *, body: bytes, damaged: bool) -> dict:
    repository = _find(hub, repo_id)
    present = repository.commits[repository.find(revision)]
    answers = []
    for file in json.loads(body)["files"]:
        large, content = _is_large(file["path"], file["size"]), present.get(file["path"])
        oid = None if content is None else hashlib.sha256(content).hexdigest() if large else _git_hash(content)
        mode = "lfs" if large else "regular"
        answers.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
    return {"files": answers}


def _lfs_batch(hub: HubServer, repo_id: str, *, body: bytes, damaged: bool) -> dict:
    answers = []
    for asked in json.loads(body)["objects"]:
        answer = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] not in hub.objects:
            links = {"upload": f"/lfs/objects/{asked['oid']}", "verify": f"/{repo_id}.git/info/lfs/objects/verify"}
            answer["actions"] = {name: {"href": hub.url + link, "header": {}} for name, link in links.items()}
        answers.append(answer)
    return {"transfer": "basic", "objects": answers}


def _put_object(hub: HubServer, oid: str, *, body: bytes, damaged: bool) -> dict:
    hub.objects[oid] = _damage(body) if damaged else body
    return {}


def _verify(hub: HubServer, repo_id: str, *, body: bytes, damaged: bool) -> dict:
    asked = json.loads(body)
    if len(hub.objects.get(asked["oid"], b"")) != asked["size"]:
        raise _Refusal(422, f"Object {asked['oid']} is not {asked['size']} bytes long")
    return {}


def _commit(hub: HubServer, repo_id: str, revision: str, *, body: bytes, damaged: bool) -> dict:
    repository = _find(hub, repo_id)
    lines = [json.loads(line) for line in body.splitlines() if line]
    files = dict(repository.commits[repository.find(revision)])
    for line in lines[1:]:
        value = line["value"]
        if line["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            if value["oid"] not in hub.objects:
                raise _Refusal(400, f"LFS object {value['oid']} was not uploaded")
            files[value["path"]] = hub.objects[value["oid"]]
        elif line["key"] == "deletedFile":
            del files[value["path"]]
        else:
            raise _Refusal(400, f"Unknown operation {line['key']}")
    name = repository.add(files, lines[0]["value"]["summary"], revision)
    return {"commitUrl": f"{hub.url}/{repo_id}/commit/{name}", "commitOid": name, "success": True}


def _info(hub: HubServer, repo_id: str, revision: str = "main", *, body: bytes, damaged: bool) -> dict:
    repository = _find(hub, repo_id)
    sha = repository.find(revision)
    siblings = [{"rfilename": name} for name in repository.commits[sha]]
    return {"id": repo_id, "sha": sha, "private": repository.private, "siblings": siblings, "tags": []}


def _files_of(hub: HubServer, repo_id: str, revision: str) -> tuple[str, Files]:
    repository = _find(hub, repo_id)
    name = repository.find(revision)
    return name, repository.commits[name]


def _tree(hub: HubServer, repo_id: str, revision: str, *, body: bytes, damaged: bool) -> list:
    entries = []
    for name, content in _files_of(hub, repo_id, revision)[1].items():
        entry = {"type": "file", "path": name, "size": len(content), "oid": _git_hash(content)}
        if _is_large(name, len(content)):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 128}
        entries.append(entry)
    return entries


def _resolve(hub: HubServer, repo_id: str, revision: str, name: str, *, body: bytes, damaged: bool) -> tuple:
    commit, files = _files_of(hub, repo_id, revision)
    if name not in files:
        raise _Refusal(404, f"{name} is not in {repo_id}", "EntryNotFound")
    return commit, files[name]


_ID = r"([^/]+/[^/]+)"
_ROUTES: tuple[tuple[str, str, Callable], ...] = (
    ("POST", r"/api/repos/create", _create),
    ("POST", rf"/api/models/{_ID}/branch/([^/]+)", _branch),
    ("GET", rf"/api/models/{_ID}/auth-check/write", _may_write),
    ("POST", r"/api/validate-yaml", _validate_yaml),
    ("POST", rf"/api/models/{_ID}/preupload/([^/]+)", _preupload),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/batch", _lfs_batch),
    ("PUT", r"/lfs/objects/([0-9a-f]{64})", _put_object),
    ("POST", rf"/{_ID}\.git/info/lfs/objects/verify", _verify),
    ("POST", rf"/api/models/{_ID}/commit/([^/]+)", _commit),
    ("GET", rf"/api/models/{_ID}", _info),
    ("GET", rf"/api/models/{_ID}/revision/(.+)", _info),
    ("GET", rf"/api/models/{_ID}/tree/([^/]+)", _tree),
    ("HEAD", rf"/{_ID}/resolve/([^/]+)/(.+)", _resolve),
    ("GET", rf"/{_ID}/resolve/([^/]+)/(.+)", _resolve),
)
