"""A local S3 server (moto) in a separate process, which fails on demand."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Application = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
REFUSALS = {
    "busy": ("503 Slow Down", "SlowDown", "Please reduce your request rate."),
    "expired": ("400 Bad Request", "ExpiredToken", "The provided token has expired."),
    "skewed": ("403 Forbidden", "RequestTimeTooSkewed", "The difference between the times is too large."),
}
"""HTTP status, S3 error code and message of each way to refuse a request."""
SLOW_S = 0.2


@dataclass(frozen=True)
class ObjectStore:
    """A running server."""

    url: str

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which clients use this server rather than any settings of the user."""
        return {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret-of-somebody",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def make_bucket(self, name: str) -> str:
        """Create a bucket, and return its URI."""
        request = urllib.request.Request(f"{self.url}/{name}", method="PUT")
        DIRECTLY.open(request, timeout=60).close()
        return f"s3://{name}"

    def publish(self, bucket: str) -> None:
        """Let clients without credentials read a bucket."""
        rule = {"Effect": "Allow", "Principal": "*", "Action": "s3:GetObject", "Resource": f"arn:aws:s3:::{bucket}/*"}
        content = json.dumps({"Version": "2012-10-17", "Statement": [rule]}).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{bucket}?policy", content, kind, method="PUT")
        DIRECTLY.open(request, timeout=60).close()

    def fail(self, how: str, times: int) -> None:
        """Make the next reads of objects fail: ``half`` (truncated answer), ``slow``, or one of ``REFUSALS``.

        With the prefix ``all-``, requests of any kind; ``all-flaky`` refuses 30% of them.
        """
        self._ask(f"/fail/{how}/{times}")

    def kill(self, pid: int, request: int) -> None:
        """Kill a process when the nth request from now on arrives (n = ``request``); its body may be in transit."""
        self._ask(f"/kill/{pid}/{request}")

    def reads(self) -> int:
        """Number of reads of objects so far."""
        return int(self._ask("/reads"))

    def _ask(self, path: str) -> bytes:
        with DIRECTLY.open(self.url + path, timeout=60) as answer:
            content: bytes = answer.read()
        return content


@contextlib.contextmanager
def serving() -> Iterator[ObjectStore]:
    """Run a server until the context or this process ends."""
    words = [sys.executable, "-W", "ignore", "-m", "tests.support.object_store"]
    root = Path(__file__).parents[2]
    with subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield ObjectStore(process.stdout.readline().strip())
        finally:
            process.kill()


def failing(application: Application) -> Application:
    """Wrap the WSGI application of an S3 server so that it fails on demand."""
    lock = threading.Lock()
    state: dict[str, Any] = {"how": "", "times": 0, "reads": 0, "left": 0}
    chance = random.Random(0)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path.startswith("/fail/"):
            _, _, how, times = path.split("/")
            state.update(how=how, times=int(times))
            start("200 OK", [])
            return [b""]
        if path.startswith("/kill/"):
            state.update(zip(("pid", "left"), map(int, path.split("/")[2:]), strict=True))
            start("200 OK", [])
            return [b""]
        if path == "/reads":
            start("200 OK", [])
            return [str(state["reads"]).encode()]
        is_read = environ["REQUEST_METHOD"] == "GET" and path.count("/") >= 2
        with lock:
            state["reads"] += is_read
            state["left"] -= 1
            if state["left"] == 0:
                os.kill(state["pid"], signal.SIGKILL)
            how = state["how"] if state["times"] else ""
            if is_read or how.startswith("all-"):
                state["times"] = max(0, state["times"] - 1)
            else:
                how = ""
            how = how.removeprefix("all-")
            if how == "flaky":
                how = "busy" if chance.random() < 0.3 else ""
        if not how:
            return application(environ, start)
        if how in REFUSALS:
            status, code, message = REFUSALS[how]
            start(status, [("Content-Type", "application/xml")])
            return [f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()]
        if how == "slow":
            time.sleep(SLOW_S)
        content = b"".join(application(environ, start))
        return [content[: len(content) // 2]] if how == "half" else [content]

    return answer


def main() -> None:
    """Serve until standard input is closed."""
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        def log(self, type: str, message: str, *args: Any) -> None:
            """Log nothing."""

    application = failing(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(f"http://127.0.0.1:{server.port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
