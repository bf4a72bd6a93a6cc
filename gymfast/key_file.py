"""Files that hold a key."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from gymfast.key_text import is_pem

_OTHER_FORMS = {
    "in DER": re.compile(rb"\x30.{1,20}\x06\x03\x2b\x65[\x6e-\x71]", re.DOTALL),
    "of OpenSSH": re.compile(rb"\s*(ssh|ecdsa|sk-ssh|sk-ecdsa)-[a-z0-9@.-]+ "),
}
"""Keys of pairs in forms that are not read. A public one taken for a shared key would be a shared
key that everybody knows."""


def read_key_file(path: Path | str) -> bytes:
    """The key in a file: its bytes, without one line end (LF or CRLF) if it ends with one.

    Nothing else is left out: any key can be written exactly, with CRLF behind it.
    Raises OSError, ValueError for a private key that everybody on the machine may read or write,
    and for a key of a pair that is not PEM. How long a key has to be is for whoever uses it to say.
    """
    with Path(path).open("rb") as file:
        key, mode = file.read(), os.fstat(file.fileno()).st_mode
    if is_pem(key) and b"PRIVATE KEY" in key and mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ValueError(
            f"{path} holds a private key, and every user of this machine may read or write it "
            f"(mode {stat.S_IMODE(mode):04o}): chmod 600 {path}"
        )
    for form, pattern in _OTHER_FORMS.items():
        if pattern.match(key):
            raise ValueError(
                f"{path} holds a key {form}, expected a shared key or PEM: "
                "`openssl pkey -in FILE` (-pubin, -inform DER) writes PEM"
            )
    return key.removesuffix(b"\r\n" if key.endswith(b"\r\n") else b"\n")


def read_shared_key_file(path: Path | str) -> bytes:
    """The shared key in a file, as `read_key_file` gives it; ValueError for a PEM file as well."""
    key = read_key_file(path)
    if is_pem(key):
        raise ValueError(
            f"{path} holds a key in PEM, which is for the records of a run only (gymfast sync): "
            "here both sides need the same secret bytes"
        )
    return key
