"""What an object store answered, as one sentence that says what to do and shows no secret.

The error of obstore is not kept as a cause: its text holds the whole answer of the server, which
may repeat names of keys, signatures and tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from gymfast.errors import NotFoundError, StoreError
from gymfast.stores.addresses import redacted

_STATUS = re.compile(r"status code: (\d{3})")
# Letters only, like all codes of these stores: no key or token of somebody passes.
_CODE = re.compile(r"<Code>([A-Za-z]{1,48})</Code>|\"(?:reason|code)\": ?\"([A-Za-z]{1,48})\"")
_REGION = re.compile(r"<Region>([a-z0-9-]{1,32})</Region>")
_METADATA = re.compile(r"169\.254\.169\.254|169\.254\.170\.2|metadata\.google|computeMetadata")
_MAX_CHARS = 200

_NO_BUCKET = "the bucket does not exist there: check its name, the account, region and endpoint"
_REGION_HINT = "the bucket is in another region: set AWS_REGION"
_EXPIRED = "the credentials have expired: get new ones"
_CREDENTIALS = "the credentials are not accepted: check those in the environment"
_MISSING = (
    "no credentials were found: set those of the store in the environment (docs/stores.md), or run "
    "where the machine has a role"
)
_CLOCK = "the clock of this machine differs from that of the store: set it"
_DENIED = (
    "these credentials may not do that: grant get, put, delete and list for the prefix (without "
    "the right to list, absent objects are refused like this as well)"
)
_THROTTLED = "the store asks for fewer requests: try again later, or use fewer readers"
_FULL = "no room, or the quota is used up: free space, or keep fewer versions"
_CONDITIONS = "the store does not know this request; create-only writes need If-None-Match"
_UNREACHABLE = "the store cannot be reached: check network, name and endpoint"
_SLOW = "no answer in time: check network and store, then try again"
_SERVER = "the store failed: try again later"
_REPLACED = "the object was written by somebody else meanwhile: try again"
_CUT = "the answer ended early or does not fit the request: the bytes were cut on the way"
_UNEXPECTED = "this is not expected of an object store: check address and endpoint"
_NO_RANGES = "the server does not serve ranges: use another one"

_BY_CODE = {
    "NoSuchBucket": _NO_BUCKET,
    "ContainerNotFound": _NO_BUCKET,
    "InvalidBucketName": _NO_BUCKET,
    "AuthorizationHeaderMalformed": _REGION_HINT,
    "PermanentRedirect": _REGION_HINT,
    "IllegalLocationConstraintException": _REGION_HINT,
    "ExpiredToken": _EXPIRED,
    "TokenRefreshRequired": _EXPIRED,
    "InvalidAccessKeyId": _CREDENTIALS,
    "InvalidClientTokenId": _CREDENTIALS,
    "SignatureDoesNotMatch": _CREDENTIALS,
    "InvalidToken": _CREDENTIALS,
    "AuthenticationFailed": _CREDENTIALS,
    "InvalidAuthenticationInfo": _CREDENTIALS,
    "RequestTimeTooSkewed": _CLOCK,
    "RequestExpired": _CLOCK,
    "AccessDenied": _DENIED,
    "AuthorizationPermissionMismatch": _DENIED,
    "SlowDown": _THROTTLED,
    "TooManyRequests": _THROTTLED,
    "ServerBusy": _THROTTLED,
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "InsufficientStorage": _FULL,
    "KeyTooLongError": "the prefix is too long: use a shorter one",
}
_BY_STATUS = {
    401: _CREDENTIALS,
    403: _DENIED,
    404: _NO_BUCKET,
    409: _REPLACED,
    412: _REPLACED,
    429: _THROTTLED,
    500: _SERVER,
    501: _CONDITIONS,
    502: _SERVER,
    503: _THROTTLED,
    504: _SLOW,
    507: _FULL,
}
# Parts of the text of obstore, in small letters: the first that is found counts.
_BY_TEXT = (
    ("redirect without location", _REGION_HINT),
    ("credential", _MISSING),
    ("unable to sign", _CREDENTIALS),
    ("non-partial response", _NO_RANGES),
    ("content-length", "the server does not say how long the object is: use another one"),
    ("requested", _CUT),
    ("content-range", _CUT),
    ("error decoding", _CUT),
    ("response body", _CUT),
)
# The same for the causes of a request that failed, which obstore names further down.
_BY_CAUSE = (
    ("dns error", _UNREACHABLE),
    ("connectionrefused", _UNREACHABLE),
    ("connect,", _UNREACHABLE),
    ("timedout", _SLOW),
    ("timed out", _SLOW),
    ("incompletemessage", _CUT),
    ("", _UNREACHABLE),
)


@dataclass(frozen=True)
class Answer:
    """What is known of a failed request: status 0 and code "" where the server gave none.

    `hint` says what to do.
    """

    status: int
    code: str
    text: str
    hint: str

    @property
    def is_final(self) -> bool:
        """True if the store refused the request, or never saw it: it will have no effect."""
        is_refused = 400 <= self.status < 500 and self.status not in (408, 409, 412, 429)
        is_refused &= self.code not in ("NoSuchUpload", "RequestTimeout")
        return is_refused or self.status == 501 or self.hint == _MISSING

    @property
    def is_late(self) -> bool:
        """True if the store took the connection and did not answer in time."""
        return self.hint == _SLOW

    @property
    def is_absent(self) -> bool:
        """True if the bucket is there, as far as known, and the object is not."""
        return self.status == 404 and self.code not in ("NoSuchBucket", "ContainerNotFound")


def answer_of(error: BaseException) -> Answer:
    """The answer in an error of obstore."""
    whole, _, causes = str(error).partition("\n\nDebug source:")
    status, code = _STATUS.search(whole), _CODE.search(whole)
    text = redacted(whole.partition(" - Server returned")[0] if status else whole)[:_MAX_CHARS]
    if isinstance(error, NotImplementedError):
        return Answer(501, "", text, _CONDITIONS)
    if _METADATA.search(text):
        return Answer(0, "", text, _MISSING)
    if not status and isinstance(error, FileNotFoundError):
        # Azure deletes in batches: the answer for one object has no status line.
        return Answer(404, code[1] or "" if code else "", text, _NO_BUCKET)
    if not status:
        return Answer(0, "", text, _hint_of(text.lower(), causes.lower()))
    found = (code[1] or code[2]) if code else ""
    hint = _BY_CODE.get(found) or _BY_STATUS.get(int(status[1]), _UNEXPECTED)
    if hint is _REGION_HINT and (region := _REGION.search(whole)):
        hint = f"the bucket is in the region {region[1]}: set AWS_REGION"
    return Answer(int(status[1]), found, text, hint)


def store_error(answer: Answer, where: str, *, is_write: bool) -> StoreError:
    """One error for an answer; `where` names the operation, the object and the store."""
    if answer.is_absent and not is_write:
        return NotFoundError(f"{where}: no such object")
    if answer.status:
        code = f"{answer.code} " if answer.code else ""
        return StoreError(f"{where}: the store answered {code}{answer.status}; {answer.hint}")
    return StoreError(f"{where}: {answer.hint} ({answer.text})")


def _hint_of(text: str, causes: str) -> str:
    for part, hint in _BY_TEXT:
        if part in text:
            return hint
    return next(hint for part, hint in _BY_CAUSE if part in causes or part in text)
