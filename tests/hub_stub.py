"""The part of the Hugging Face Hub that uploads and downloads call, on the loopback interface, with faults on order."""

import base64
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_secretTokenThatNobodyMaySee"
ENDPOINTS = {  # name -> what the address looks like
    "whoami": r"/api/whoami-v2",
    "create": r"/api/repos/create",
    "validate": r"/api/validate-yaml",
    "preupload": r"/api/models/(?P<repository>.+)/preupload/main",
    "commit": r"/api/models/(?P<repository>.+)/commit/main",
    "info": r"/api/models/(?P<repository>[^/]+/[^/]+)(/revision/main)?",
    "batch": r"/(?P<repository>.+)\.git/info/lfs/objects/batch",
    "store": r"/store/(?P<oid>\w+)",
    "resolve": r"/(?P<repository>[^/]+/[^/]+)/resolve/main/(?P<path>.+)",
}


@dataclass
class Fault:
    """What an endpoint does instead of its work: `kind` is a status, or one of the methods of `Handler` below."""

    kind: int | str
    times: int = 10**9
    headers: dict = field(default_factory=dict)
    body: bytes = b""


class HubStub(ThreadingHTTPServer):
    """Files whose names end in .mp4 or .png travel as large files do, the others within the commit."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.repositories = {}  # name -> {path: bytes}
        self.store = {}  # sha256 -> bytes
        self.commits = 0
        self.calls = []  # names of endpoints, in order
        self.received = []  # the bodies, decoded as far as they go
        self.faults = {}  # endpoint -> Fault
        self.closing = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *_):  # the client gave up: that is what some tests are about
        pass

    def close(self):
        self.closing.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def serve(self):
        self.body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        address = self.path.split("?")[0]
        matches = {name: re.fullmatch(pattern, address) for name, pattern in ENDPOINTS.items()}
        name, match = next(((name, match) for name, match in matches.items() if match), ("unknown", None))
        self.server.calls.append(name)
        self.server.received.append(self.body)
        fault = self.server.faults.get(name)
        if fault and fault.times > 0:
            fault.times -= 1
            getattr(self, str(fault.kind), self.fail)(fault)
        elif name == "unknown":
            self.answer(404, error=f"no such address: {address}")
        elif name != "store" and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(401, error="Invalid user token.")
        else:
            getattr(self, f"do_{name}")(**match.groupdict())

    do_GET = do_POST = do_PUT = serve

    def log_message(self, *_):
        pass

    def send(self, status, data, headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def answer(self, status=200, **body):
        self.send(status, json.dumps(body).encode(), {"Content-Type": "application/json"})

    # ------------------------------------------------------------ faults
    def fail(self, fault):
        """A status; the token comes back in the message, as an unkind hub might do."""
        body = fault.body or json.dumps({"error": f"not for {self.headers['Authorization']}\nsecond line"}).encode()
        self.send(fault.kind, body, {"Content-Type": "application/json", **fault.headers})

    def file(self, fault):
        """A file, with headers that may lie about it."""
        self.send(200, fault.body, fault.headers)

    def hang(self, _):
        self.close_connection = True
        self.server.closing.wait(30)

    def cut(self, _):
        self.close_connection = True

    def half(self, _):
        """The connection ends within the answer."""
        self.send(200, b'{"name": ', {"Content-Length": "1000"})
        self.close_connection = True

    def drip(self, _):
        """A byte now and then."""
        self.send(200, b"", {"Content-Length": "1000"})
        while not self.server.closing.wait(0.05):
            self.wfile.write(b" ")

    def endless(self, fault):
        """A file of which no size is said."""
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        started = time.monotonic()
        while time.monotonic() - started < 30:
            self.wfile.write(b"10000\r\n" + bytes(0x10000) + b"\r\n")

    # ------------------------------------------------------------ endpoints
    def do_whoami(self):
        self.answer(name="alice", type="user")

    def do_create(self):
        asked = json.loads(self.body)
        repository = f"{asked.get('organization') or 'alice'}/{asked['name']}"
        exists = repository in self.server.repositories
        self.server.repositories.setdefault(repository, {})
        url = f"{self.server.url}/{repository}"
        self.answer(**{"status": 409, "error": "You already created this model repo"} if exists else {}, url=url)

    def do_validate(self):
        self.answer(errors=[], warnings=[{"message": "a warning"}])

    def do_preupload(self, repository):
        files = self.server.repositories.get(repository)
        if files is None:
            return self.answer(404, error="Repository not found")
        answers = []
        for path in (file["path"] for file in json.loads(self.body)["files"]):
            large = path.endswith((".mp4", ".png"))
            answers.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False})
            if path in files:
                data = files[path]
                git_blob = b"blob %d\0" % len(data) + data
                answers[-1]["oid"] = hashlib.sha256(data).hexdigest() if large else hashlib.sha1(git_blob).hexdigest()
        self.answer(files=answers)

    def do_batch(self, repository):
        objects = [dict(object) for object in json.loads(self.body)["objects"]]
        for object in objects:
            if object["oid"] not in self.server.store:
                object["actions"] = {"upload": {"href": f"{self.server.url}/store/{object['oid']}"}}
        self.answer(transfer="basic", objects=objects)

    def do_store(self, oid):
        if hashlib.sha256(self.body).hexdigest() != oid:
            return self.answer(400, error="other bytes")
        self.server.store[oid] = self.body
        self.answer()

    def do_commit(self, repository):
        files = {}
        for line in map(json.loads, self.body.splitlines()):
            if line["key"] == "file":
                files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "lfsFile":
                files[line["value"]["path"]] = self.server.store[line["value"]["oid"]]
        self.server.repositories[repository].update(files)
        self.server.commits += 1
        url = f"{self.server.url}/{repository}/commit/{self.server.commits}"
        self.answer(commitUrl=url, commitOid=str(self.server.commits), pullRequestUrl=None)

    def do_info(self, repository):
        if repository not in self.server.repositories:
            return self.answer(404, error="Repository not found")
        self.answer(
            id=repository, modelId=repository, sha=str(self.server.commits), tags=[], siblings=[], private=False
        )

    def do_resolve(self, repository, path):
        files = self.server.repositories.get(repository)
        if files is None or path not in files:
            return self.answer(404, error="Repository not found" if files is None else "Entry not found")
        self.send(200, files[path], {"Content-Type": "application/octet-stream"})
