"""The store at the far end: the S3 of the tests as a process, with a log of its requests.

Reads words from its standard input: `log` prints the requests since the last time as JSON, `drop`
ends all connections. Ends with its input.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from functools import partial
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from object_double import Bucket, BucketHandler

PORT = 9000
Entry = tuple[float, float, str, str, str, int]


class LoggedHandler(BucketHandler):
    """Notes who asked what, and when it came and was answered."""

    disable_nagle_algorithm = True  # head and body are two writes: the second must not wait
    page = 1000
    log: ClassVar[list[Entry]] = []
    sockets: ClassVar[set[socket.socket]] = set()

    def setup(self) -> None:
        super().setup()
        self.sockets.add(self.connection)

    def finish(self) -> None:
        self.sockets.discard(self.connection)
        super().finish()

    def send_response(self, code: int, message: str | None = None) -> None:
        self.status = code
        super().send_response(code, message)

    def _logged(self) -> None:
        start_s, self.status = time.monotonic(), 0
        who = self.headers.get("authorization", "").partition("Credential=")[2].partition("/")[0]
        self._route()
        what = self.command + (" create" if self.headers.get("if-none-match") == "*" else "")
        entry = (start_s, time.monotonic(), who, what, self.key or self.path, self.status)
        self.log.append(entry)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _logged  # noqa: N815


class Server(ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: object, client_address: object) -> None:
        """Clients that hang up, and connections that `drop` ends."""


def main(host: str) -> None:
    class Handler(LoggedHandler):
        held = Bucket()

    server = Server((host, PORT), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    say = partial(print, flush=True)
    say("ready")
    for line in sys.stdin:
        if line.strip() == "log":
            found = LoggedHandler.log[:]
            del LoggedHandler.log[: len(found)]
            say(json.dumps(found))
        elif line.strip() == "drop":
            for each in list(LoggedHandler.sockets):
                each.shutdown(socket.SHUT_RDWR)
            say("done")


if __name__ == "__main__":
    main(sys.argv[1])
