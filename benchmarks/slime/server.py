"""The fake engine: an HTTP server with the stand-in of SGLang of the tests, around a large model.

It holds a parameter for every tensor of a checkpoint. A reload reads the files as SGLang does, a
message goes to the loader of gymfast. Run by rank.py, with tests/ on the path.
"""

from __future__ import annotations

import sys
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from integrations.sglang_server import Handler
from integrations.sglang_stand_in import Engine, install_sglang
from integrations.sglang_toy import FlatModel
from safetensors import safe_open

from benchmarks.slime.model import digest_of, files_of, read_checkpoint


class LargeEngine(Engine):
    """`/digest` tells what it serves."""

    def do_update_weights_from_disk(self, body: dict[str, Any]) -> tuple[int, Any]:
        for path in files_of(Path(body["model_path"])):
            with safe_open(path, "pt") as file:
                names = file.keys()
                self.model.load_weights((name, file.get_tensor(name)) for name in names)
        self.scheduler.record_weight_version_change(body["weight_version"])
        return 200, {"success": True, "message": "Success."}

    def do_digest(self, body: dict[str, Any]) -> tuple[int, Any]:  # noqa: ARG002 - of the server
        loads = [len(names) for names in self.model.loads]
        self.model.loads.clear()
        return 200, {"digest": digest_of(self.model.named_parameters()), "loads": loads}


def main() -> None:
    sys.modules.update(install_sglang())
    Handler.make_engine = lambda options: LargeEngine(
        FlatModel(read_checkpoint(Path(options["model_path"]))), options
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_address[1], flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
