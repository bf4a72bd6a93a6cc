"""`gymfast serve-pull`."""

from __future__ import annotations

from pathlib import Path

import click

from gymfast.cli.delta.key import read_bearer_key
from gymfast.cli.hf_delta.options import DIRECTORY
from gymfast.cli.options import EXISTING_FILE, threads_option
from gymfast.cli.output import Output, with_output

_EPILOG = """\b
Examples:
  gymfast serve-pull --base checkpoint/
  gymfast serve-pull --base checkpoint/ --port 30001 --json
"""


@click.command("serve-pull", epilog=_EPILOG)
@click.option("--base", type=DIRECTORY, required=True, help="The checkpoint that is version 0.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=30001, show_default=True, metavar="N"
)
@click.option(
    "--key-file",
    type=EXISTING_FILE,
    metavar="KEY",
    help="Answer only requests with the header 'Authorization: Bearer' and the key in KEY.",
)
@click.option(
    "--pre-read-hook",
    metavar="MODULE.FUNCTION",
    help="Called with source and target before anything is read.",
)
@threads_option
@with_output
def command(
    output: Output,
    base: Path,
    host: str,
    port: int,
    key_file: Path | None,
    pre_read_hook: str | None,
    threads: int | None,
) -> None:
    """Serve the engine's pull endpoint, POST /pull_weights, over HTTP.

    The request is that of SGLang: local_checkpoint_dir, source_dir and
    target_version. Each does what `gymfast hf-delta pull` does, with --base as
    version 0. A client may have any directory pulled that this user may write,
    so other hosts than this one need a key. The server runs until Ctrl-C.
    """
    from gymfast.delta.hf_delta import PullReport, pull
    from gymfast.delta.hf_delta.server import PullRequest, PullServer

    def puller(request: PullRequest) -> PullReport:
        return pull(
            request.local,
            base,
            request.source,
            request.target,
            pre_read_hook=pre_read_hook,
            threads=threads,
        )

    with PullServer(host, port, puller, read_bearer_key(key_file)) as server:
        output.result({"url": server.url}, [f"listening on {server.url}"])
        server.serve_forever()
