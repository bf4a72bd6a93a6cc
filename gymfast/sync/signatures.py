"""Signatures of records: HMAC-SHA256 or Ed25519 (docs/sync-protocol.md, 3.5).

The form of the key decides, never the record: a reader accepts signatures of one kind only.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from typing import Any, Final

from gymfast.errors import MissingDependencyError
from gymfast.key_text import is_pem

MIN_KEY_BYTES = 16
MAC_PATTERN = r"\A([0-9a-f]{64}|ed25519:[0-9a-f]{128})?\Z"

_PREFIX: Final = "ed25519:"
_BLOCK = re.compile(rb"-----BEGIN ([A-Z0-9 ]+)-----\r?\n([^-]*)-----END \1-----")
_OPENSSL = "`openssl genpkey -algorithm ed25519` makes one"


class Ed25519Keys:
    """The public keys that are trusted and, at a publisher, the private key that signs."""

    def __init__(self, public: Sequence[Any], private: Any | None) -> None:
        """Keys of the package cryptography; the public half of `private` is trusted too."""
        self._private = private
        self._public = (*([private.public_key()] if private is not None else []), *public)

    @property
    def can_sign(self) -> bool:
        """True if there is a private key."""
        return self._private is not None

    @property
    def public_half(self) -> Ed25519Keys:
        """The trusted keys, without one that signs."""
        return Ed25519Keys(self._public, None)

    def sign(self, data: bytes) -> str:
        """The signature as it stands in `mac`; ValueError without a private key."""
        if self._private is None:
            raise ValueError(
                "the key file holds public keys only, which cannot sign: a publisher needs the "
                "private key"
            )
        signature: bytes = self._private.sign(data)
        return _PREFIX + signature.hex()

    def is_signed(self, data: bytes, mac: str) -> bool:
        """True if any of the trusted keys made that signature of the data."""
        from cryptography.exceptions import InvalidSignature

        signature = bytes.fromhex(mac.removeprefix(_PREFIX))
        for key in self._public:
            try:
                key.verify(signature, data)
            except InvalidSignature:
                continue
            return True
        return False


Key = bytes | Ed25519Keys
"""A shared key as its bytes, or what a PEM file holds."""


def check_key(key: Key | None) -> Key | None:
    """The key itself; bytes that are PEM become the keys they hold.

    Raises ValueError for a shared key under 16 bytes and for PEM that holds anything but Ed25519
    keys, MissingDependencyError if those need a package that is not installed.
    """
    if not isinstance(key, bytes):
        return key
    if is_pem(key):
        return _parse_pem(key)
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"the key has {len(key)} bytes, expected at least {MIN_KEY_BYTES}")
    return key


def check_signing_key(key: Key | None) -> Key | None:
    """The same for a publisher; ValueError also if the key can only check signatures."""
    found = check_key(key)
    if isinstance(found, Ed25519Keys) and not found.can_sign:
        found.sign(b"")
    return found


def reading_key(key: Key | None) -> Key | None:
    """What of a key a reader needs."""
    return key.public_half if isinstance(key, Ed25519Keys) else key


def mac_of(data: bytes, key: Key) -> str:
    """The signature of the data, as `mac` holds it."""
    key = check_signing_key(key) or b""
    if isinstance(key, Ed25519Keys):
        return key.sign(data)
    return hmac.new(key, data, hashlib.sha256).hexdigest()


def problem_of(data: bytes, mac: str, key: Key) -> str:
    """What is wrong with the signature of the data; "" if the key or one of the keys made it."""
    key = check_key(key) or b""
    is_pair = isinstance(key, Ed25519Keys)
    if not mac:
        kind = "an Ed25519 key" if is_pair else "a key"
        return (
            f"the record is not signed, but this reader has {kind}: publish with "
            f"{'its private key' if is_pair else 'the same key'}, or read without one"
        )
    found, expected = kind_of(mac), "Ed25519" if is_pair else "HMAC-SHA256"
    if found != expected:
        return (
            f"the record is signed with {found}, but the key of this reader is for {expected}: "
            f"give the {'public key (PEM)' if found == 'Ed25519' else 'shared key'} of its "
            "publisher"
        )
    if isinstance(key, Ed25519Keys):
        is_right = key.is_signed(data, mac)
    else:
        is_right = hmac.compare_digest(mac, mac_of(data, key))
    return "" if is_right else "the signature was made with another key or the record was changed"


def kind_of(mac: str) -> str:
    """How a signature was made."""
    return "Ed25519" if mac.startswith(_PREFIX) else "HMAC-SHA256"


def _parse_pem(text: bytes) -> Ed25519Keys:
    blocks = [(match[1].decode(), match[0]) for match in _BLOCK.finditer(text)]
    num_lines = text.count(b"-----BEGIN ") + text.count(b"-----END ")
    if not blocks or num_lines != 2 * len(blocks):
        raise ValueError(
            "the PEM text of the key is cut off or damaged: each BEGIN line needs its END line"
        )
    public, private = [], []
    for label, block in blocks:
        if label == "PUBLIC KEY":
            public.append(_load(label, block))
        elif label == "PRIVATE KEY":
            private.append(_load(label, block))
        else:
            raise ValueError(_label_problem(label))
    if len(private) > 1:
        raise ValueError(
            f"the PEM text holds {len(private)} private keys, and a publisher signs with one: "
            "keep the public halves of the others (`openssl pkey -pubout`)"
        )
    return Ed25519Keys(public, private[0] if private else None)


def _label_problem(label: str) -> str:
    if label == "ENCRYPTED PRIVATE KEY":
        return (
            "the private key is encrypted, and nobody can be asked for its password: "
            "`openssl pkey -in FILE` writes it plain, to a file of mode 600"
        )
    return (
        f"the PEM text holds '{label}', expected 'PRIVATE KEY' or 'PUBLIC KEY' of Ed25519: "
        f"{_OPENSSL}"
    )


def _load(label: str, block: bytes) -> Any:
    """The key in a block of PEM; the text of what the parser says is left out, it may quote."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise MissingDependencyError(
            "a key in PEM needs cryptography: pip install 'gymfast[sign]'"
        ) from error
    key: Any = None
    try:
        if label == "PUBLIC KEY":
            key = serialization.load_pem_public_key(block)
        else:
            key = serialization.load_pem_private_key(block, None)
        found = type(key).__name__.removesuffix("PublicKey").removesuffix("PrivateKey")
    except (ValueError, TypeError):
        found = ""
    except UnsupportedAlgorithm:
        found = "an unknown algorithm"
    if isinstance(key, ed25519.Ed25519PublicKey | ed25519.Ed25519PrivateKey):
        return key
    if not found:
        raise ValueError(f"the PEM text holds a damaged '{label}': make it anew; {_OPENSSL}")
    raise ValueError(f"the PEM text holds a '{label}' of {found}, expected Ed25519: {_OPENSSL}")
