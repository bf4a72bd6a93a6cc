"""`gymfast relay`."""

from __future__ import annotations

from pathlib import Path

import click

from gymfast.cli.delta.key import read_bearer_key
from gymfast.cli.options import EXISTING_FILE, FiniteRange, bwlimit_option, store_argument
from gymfast.cli.output import Output, with_output

_EPILOG = """\b
Examples:
  gymfast relay /mnt/weights --host 10.0.0.1 --key-file relay.key
  export GYMFAST_RELAY_KEY_FILE=relay.key
  gymfast sync watch relay://10.0.0.1:7080 replica/ --run demo
"""


_MIN_BYTES_PER_S = 2 << 20


@click.command("relay", epilog=_EPILOG)
@store_argument
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=7080, show_default=True, metavar="N")
@click.option(
    "--key-file",
    type=EXISTING_FILE,
    metavar="KEY",
    help="Answer only readers that have the key in KEY.",
)
@click.option(
    "--cache-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep objects in DIR.  [default: the folder for temporary files]",
)
@click.option(
    "--cache-gb",
    type=FiniteRange(min=1),
    default=64.0,
    show_default=True,
    metavar="GB",
    help="Keep so many GB (10^9 bytes) of objects.",
)
@click.option(
    "--freshness",
    type=FiniteRange(min=0),
    default=0.25,
    show_default=True,
    metavar="S",
    help="Seconds for which an answer of STORE counts.",
)
@bwlimit_option
@click.option(
    "--timeout",
    "timeout_s",
    type=FiniteRange(min=0, min_open=True),
    default=20.0,
    show_default=True,
    metavar="S",
    help="Give up a relay that STORE is after S seconds of silence.",
)
@with_output
def command(
    output: Output,
    store: str,
    host: str,
    port: int,
    key_file: Path | None,
    cache_dir: Path | None,
    cache_gb: float,
    freshness: float,
    bwlimit: int | None,
    timeout_s: float,
) -> None:
    """Serve STORE to the readers of a site, each object fetched once.

    Readers use relay://HOST:PORT as their store, or relay://HOST:PORT,STORE to read
    from STORE itself while the relay is away. STORE may be a relay too. What has
    been fetched is kept until the relay ends; nothing is left behind. Leases and
    statuses of readers are passed on to STORE. The relay runs until Ctrl-C.
    """
    from gymfast.stores import open_store
    from gymfast.stores.store_server import StoreServer
    from gymfast.sync.bandwidth import limited
    from gymfast.sync.relay import RelayCache, is_of_reader

    if bwlimit is not None and bwlimit < _MIN_BYTES_PER_S:
        raise click.UsageError(
            f"--bwlimit of a relay is at least {_MIN_BYTES_PER_S >> 20}M: its readers wait for a "
            "piece of 8 MiB, and give up after a minute"
        )
    upstream = limited(open_store(store, relay_timeout_s=timeout_s), bwlimit)
    num_bytes = int(cache_gb * 1e9)
    relay = RelayCache(upstream, max_bytes=num_bytes, folder=cache_dir, freshness_s=freshness)
    key = read_bearer_key(key_file)
    try:
        with StoreServer(
            host, port, relay, key, may_write=is_of_reader, status=relay.status
        ) as server:
            fields = {"url": server.url, "upstream": upstream.url}
            output.result(fields, [f"{server.url} serves {upstream.url}"])
            server.serve_forever()
    finally:
        relay.close()
