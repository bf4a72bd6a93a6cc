"""A server around the stand-in, or around the real files in the folder that is its argument.

`python -m integrations.sglang_server [FOLDER]` prints its port. `/reset` makes a new engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from integrations.sglang_real import RealEngine, install
from integrations.sglang_stand_in import Engine, install_sglang
from integrations.sglang_toy import FlatModel, ToyModel
from safetensors.torch import load_file


class Handler(BaseHTTPRequestHandler):
    engine: Engine
    make_engine: Callable[[dict[str, Any]], Engine]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path == "/reset":
            type(self).engine = type(self).make_engine(body)
        key = self.engine.options.get("api_key")
        try:
            if self.path == "/reset":
                code, answer = 200, {}
            elif key and self.headers.get("Authorization") != f"Bearer {key}":
                code, answer = 401, {"error": "Unauthorized"}
            else:
                code, answer = self.engine.answer(self.path, body)
        except Exception as error:  # noqa: BLE001 - one that raises takes the server with it
            sys.stderr.write(f"the engine dies: {error!r}\n")
            sys.stderr.flush()
            os._exit(1)
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST  # noqa: N815 - http.server's

    def log_message(self, *arguments: Any) -> None:
        return


def _model(options: dict[str, Any]) -> ToyModel | FlatModel:
    if "model_path" not in options:
        return ToyModel(packs=options.get("packs", False))
    (file,) = Path(options["model_path"]).glob("*.safetensors")
    return FlatModel(load_file(file))


def main(source: str) -> None:
    if source:
        real = install(Path(source))
        Handler.make_engine = lambda options: RealEngine(_model(options), options, real)
    else:
        sys.modules.update(install_sglang())
        Handler.make_engine = lambda options: Engine(_model(options), options)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1])
