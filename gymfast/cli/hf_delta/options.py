"""Options and arguments that several commands of `gymfast hf-delta` share."""

from __future__ import annotations

from pathlib import Path

import click

ENCODINGS = ("xor", "overwrite")
DIGESTS = ("xxh3-128", "blake3", "adler32")
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)

version_option = click.option(
    "--version", type=click.IntRange(min=1), metavar="N", help="Number of the new version."
)
encoding_option = click.option(
    "--encoding",
    type=click.Choice(ENCODINGS),
    default=ENCODINGS[0],
    show_default=True,
    help="How changed bytes are stored.",
)
checksum_option = click.option(
    "--checksum",
    type=click.Choice(DIGESTS),
    default=DIGESTS[0],
    show_default=True,
    help="Digest of every new tensor.",
)
