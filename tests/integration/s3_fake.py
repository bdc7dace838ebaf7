"""A small S3 for what no real server does on demand: refusals, clocks, credentials that expire.

It keeps objects, completes multipart uploads, and asks `refuse(request)` before each request; a
refusal is (status, code, headers). What it was asked is in `asked`, in order, with the moment, the
signature's own date and the access key.
"""

import http.server
import re
import threading
import time
import urllib.parse
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime


@dataclass(frozen=True)
class Request:
    """One request as it came in, by the true clock."""

    method: str
    name: str
    query: dict
    at_s: float
    signed: datetime
    key: str
    headers: dict

    @property
    def part(self):
        """Of a multipart upload; 0 for anything else."""
        return int(self.query.get("partNumber", ["0"])[0])


class FakeS3:
    """Objects by path, uploads by id. ``clock_off_s``: how far its clock is from ours."""

    def __init__(self):
        self.objects, self.uploads, self.asked = {}, {}, []
        self.clock_off_s = 0.0
        self.refuse = lambda request: None
        self.lock = threading.Lock()

    def now(self):
        return datetime.now(UTC) + timedelta(seconds=self.clock_off_s)

    def answer(self, request, body):
        """(status, body, headers)."""
        with self.lock:
            self.asked.append(request)
            if refusal := self.refuse(request):
                status, code, headers = refusal
                return status, f"<Error><Code>{code}</Code></Error>".encode(), headers
            return self._do(request, body)

    def _do(self, request, body):
        upload = request.query.get("uploadId", [""])[0]
        match request.method:
            case "POST" if not upload:
                upload = f"upload-{len(self.uploads)}"
                self.uploads[upload] = {}
                text = f"<R><UploadId>{upload}</UploadId></R>"
                return 200, text.encode(), {}
            case "POST":
                parts = self.uploads[upload]
                self.objects[request.name] = b"".join(parts[n] for n in sorted(parts))
                return 200, b"<R><ETag>e</ETag></R>", {}
            case "PUT" if upload:
                self.uploads[upload][request.part] = body
                return 200, b"", {"ETag": "e"}
            case "PUT":
                self.objects[request.name] = body
                return 200, b"", {"ETag": "e"}
            case "DELETE":
                self.objects.pop(request.name, None)
                return 204, b"", {}
            case "GET" if "list-type" in request.query:
                where = f"{request.name}/{request.query['prefix'][0]}"
                names = sorted(n for n in self.objects if n.startswith(where))
                keys = [n[len(request.name) + 1 :] for n in names]
                sizes = [len(self.objects[n]) for n in names]
                rows = (f"<Key>{k}</Key><Size>{n}</Size>" for k, n in zip(keys, sizes, strict=True))
                text = "".join(f"<Contents>{row}</Contents>" for row in rows)
                return 200, f"<ListBucketResult>{text}</ListBucketResult>".encode(), {}
        found = self.objects.get(request.name)
        if found is None:
            return 404, b"<Error><Code>NoSuchKey</Code></Error>", {}
        return 200, found, {}


class Handler(http.server.BaseHTTPRequestHandler):
    """HTTP around it."""

    store: FakeS3
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        where = urllib.parse.urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        key = re.search("Credential=([^/]*)/", self.headers.get("Authorization", ""))
        signed = datetime.strptime(self.headers["X-Amz-Date"], "%Y%m%dT%H%M%SZ")
        request = Request(
            method=self.command,
            name=where.path,
            query=urllib.parse.parse_qs(where.query, keep_blank_values=True),
            at_s=time.monotonic(),
            signed=signed.replace(tzinfo=UTC),
            key=key.group(1) if key else "",
            headers={name.lower(): value for name, value in self.headers.items()},
        )
        status, answer, headers = self.store.answer(request, body)
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(answer))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer)

    do_PUT = do_POST = do_HEAD = do_DELETE = do_GET  # noqa: N815

    def date_time_string(self, timestamp=None):
        return format_datetime(self.store.now(), usegmt=True)

    def log_message(self, *_):
        pass


@contextmanager
def fake_s3():
    """(store, endpoint)."""
    store = FakeS3()
    handler = type("H", (Handler,), {"store": store})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield store, f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
