"""What a file system of fsspec raised, as one sentence that says what to do and shows no secret.

Its text is not repeated, nor kept as a cause: it may hold addresses with users, settings and what a
server answered.
"""

from __future__ import annotations

import errno
import ftplib
from collections.abc import Iterator

from gymfast.errors import StoreError
from gymfast.stores.fsspec_calls import ABSENT

_CREDENTIALS = (
    "the credentials are not accepted, or may not do that: check the settings of fsspec "
    "(docs/stores.md) and the rights"
)
_UNREACHABLE = "it cannot be reached: check network, name and port"
_SLOW = "no answer in time: check network and server, then try again"
_FULL = "no room, or the quota is used up: free space, or keep fewer versions"
_SETTINGS = "its settings are unusable: check those of fsspec (docs/stores.md)"
_UNKNOWN = "this file system of fsspec does not do that: use another one"
_PACKAGE = "a package that it needs is not installed: see the documentation of fsspec"
_FAILED = "the server or its connection failed: try again"

_BY_ERRNO = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _CREDENTIALS,
    errno.EPERM: _CREDENTIALS,
    errno.EROFS: "it is read-only",
}
# Parts of the names of kinds of errors, in small letters: the first that is found counts.
_BY_KIND = (
    ("importerror", _PACKAGE),
    ("permission", _CREDENTIALS),
    ("auth", _CREDENTIALS),
    ("credential", _CREDENTIALS),
    ("hostkey", "the key of the server is not the one that is known: check it"),
    ("timeout", _SLOW),
    ("nospace", _FULL),
    ("quota", _FULL),
    ("notimplemented", _UNKNOWN),
    ("connect", _UNREACHABLE),
    ("gaierror", _UNREACHABLE),
    ("typeerror", _SETTINGS),
    ("valueerror", _SETTINGS),
)
# Full, too long, not allowed: what a server of FTP says with a number.
_BY_FTP_CODE = {"530": _CREDENTIALS, "532": _CREDENTIALS, "452": _FULL, "552": _FULL}
# No such file; and a command that the server does not know, or not for a folder that is not there.
_ABSENT_FTP_CODES = ("550", "500", "501", "502", "504")
_LOST = (ConnectionError, TimeoutError, EOFError)


def is_absence(error: BaseException) -> bool:
    """True if the error says that a file is not there, and not that nobody could look.

    The FTP of fsspec calls every failure an absent file; what it failed of is the cause.
    """
    return isinstance(error, ABSENT) and not any(map(_is_failure, _causes(error)))


def store_error(error: BaseException, where: str) -> StoreError:
    """One error; `where` names the operation, the object and the store."""
    failures = [cause for cause in _causes(error) if _is_failure(cause)]
    cause = failures[0] if failures else error
    kind = type(cause).__name__
    number = cause.errno if isinstance(cause, OSError) else None
    if number is not None and number in errno.errorcode:
        kind += f" [{errno.errorcode[number]}]"
    hint = _BY_ERRNO.get(number or 0) or _hint_of(cause)
    return StoreError(f"{where}: {kind}; {hint}")


def _hint_of(error: BaseException) -> str:
    if isinstance(error, ftplib.Error):
        return _BY_FTP_CODE.get(str(error)[:3], _FAILED)
    kinds = " ".join(kind.__name__.lower() for kind in type(error).__mro__)
    return next((hint for part, hint in _BY_KIND if part in kinds), _FAILED)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that led to it."""
    seen: set[int] = set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:
        seen.add(id(found))
        yield found
        found = found.__cause__ or found.__context__


def _is_failure(error: BaseException) -> bool:
    """True for a lost connection, and for what a server of FTP answers but "no such file"."""
    is_refusal = isinstance(error, ftplib.Error) and str(error)[:3] not in _ABSENT_FTP_CODES
    return is_refusal or isinstance(error, _LOST)
