"""Bad input of stores, end to end: one clear error with the object's name, nothing written, and
serving goes on with the last good version.

Publishers and readers run over a server of the tests that speaks S3, and a proxy that spoils it.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pytest
from object_double import Bucket, Held, Quiet, serve, serve_bucket
from object_proxy import Proxy, Trouble, serve_proxy
from object_settings import KEY_ID, SECRET, s3_settings
from safetensors.numpy import save_file
from sync.harness import RUN, Weights, assert_same, copy_of, history, reader, zeros_like

from gymfast.cli import main
from gymfast.errors import ChainError, DeadlineError, FormatError, GymfastError, StoreError
from gymfast.stores import ObjectStore, object_client, objects
from gymfast.sync import Publisher, Subscriber
from gymfast.sync.keys import RunKeys
from gymfast.sync.manifest import HintRecord, encode

KEYS = RunKeys(RUN)
FOR_EVER = 10**6
KEY = b"0123456789abcdef"


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with serve_bucket() as served:
        yield served


@pytest.fixture
def proxy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    with serve_proxy(bucket.endpoint) as between:
        for name, value in s3_settings(between.endpoint).items():
            monkeypatch.setenv(name, value)
        for module in (objects, object_client):
            monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.005)
        yield between


@dataclass
class Scene:
    """A publisher at version 1, and a reader that serves version 0."""

    bucket: Bucket
    proxy: Proxy
    states: list[Weights]
    source: Publisher
    follower: Subscriber
    live: Weights
    key: bytes | None = None
    held: dict[str, Held] = field(default_factory=dict)

    @property
    def objects(self) -> list[str]:
        """The keys of the objects, oldest first: those of versions 0 and 1."""
        return [key for key in self.bucket.objects if "/objects/" in key]

    def spoil(self, *troubles: Trouble) -> None:
        self.proxy.troubles[:] = troubles

    def pull_fails(self, error: type[GymfastError], match: str, name: str) -> None:
        """The reader is told in one sentence, holds what it held, and wrote nothing."""
        before = self.written()
        with pytest.raises(error, match=match) as caught:
            self.follower.pull()
        text = str(caught.value)
        assert name in text
        assert text.isprintable()
        assert len(text) < 1000
        assert SECRET not in text
        assert KEY_ID not in text
        assert (self.follower.version, self.follower.state.name) == (0, "CLEAN")
        assert self.follower.status.last_error == text
        assert_same(self.live, self.states[0])
        assert self.written() == before

    def publish_fails(self, match: str, name: str) -> None:
        """The publisher is told in one sentence; no record and no new object is there."""
        before = self.written()
        with pytest.raises(StoreError, match=match) as caught:
            self.source.publish(self.states[2])
        assert name in str(caught.value)
        assert self.source.version == 1
        self.proxy.troubles.clear()
        assert self.written() == before

    def heals(self) -> None:
        """Without the trouble everything goes on, from where it was."""
        self.proxy.troubles.clear()
        assert self.source.publish(self.states[2]).version == 2
        assert self.follower.pull().version == 2
        assert_same(self.live, self.states[2])

    def written(self) -> dict[str, bytes]:
        """What lies in the bucket, but for leases."""
        found = dict(self.bucket.objects)
        return {key: held.body for key, held in found.items() if "/readers/" not in key}


@pytest.fixture
def scene(bucket: Bucket, proxy: Proxy) -> Scene:
    return scene_of(bucket, proxy)


def scene_of(bucket: Bucket, proxy: Proxy, key: bytes | None = None) -> Scene:
    store = ObjectStore("s3://bucket/a", timeout_s=2.0, retry_s=0.1)
    states = history(2)
    source = Publisher(store, RUN, threads=1, anchor_ratio=100.0, timeout_s=0.5, key=key)
    live = zeros_like(states[0])
    follower = reader(store, live, timeout_s=0.3, key=key)
    source.publish(states[0])
    follower.pull()
    source.publish(states[1])
    return Scene(bucket, proxy, states, source, follower, live, key)


def answers(status: int, code: str, text: str = "") -> list[Trouble]:
    """Every request is refused like that."""
    return [
        Trouble("answer", method, status=status, code=code, text=text, count=FOR_EVER)
        for method in ("GET", "HEAD", "PUT", "POST", "DELETE")
    ]


REFUSALS = {
    "wrong_bucket": (404, "NoSuchBucket", "", "bucket does not exist there: check its name"),
    "wrong_region": (
        *(400, "AuthorizationHeaderMalformed", "x</Message><Region>eu-west-3</Region>"),
        "in the region eu-west-3: set AWS_REGION",
    ),
    "expired_credentials": (400, "ExpiredToken", "", "credentials have expired: get new ones"),
    "clock_skew": (403, "RequestTimeTooSkewed", "", "the clock of this machine differs"),
    "store_full": (507, "InsufficientStorage", "", "no room, or the quota is used up: free space"),
    "quota_used_up": (403, "QuotaExceeded", "", "no room, or the quota is used up: free space"),
}


@pytest.mark.parametrize("row", REFUSALS)
def test_bad_input_refused_requests(scene: Scene, row: str) -> None:
    """Wrong bucket or region, expired credentials, clock skew, store full."""
    status, code, text, hint = REFUSALS[row]
    is_full = row in ("store_full", "quota_used_up")
    if not is_full:
        scene.spoil(*answers(status, code, text))
        scene.pull_fails(StoreError, hint, "run-a/")
    puts = [t for t in answers(status, code, text) if t.method in ("PUT", "POST") or not is_full]
    if not is_full:
        # An answer to HEAD has no body, so the first look would only tell the status.
        puts = [trouble for trouble in puts if trouble.method != "HEAD"]
    scene.spoil(*puts)
    scene.publish_fails(hint, "run-a/objects/")
    scene.heals()


def test_bad_input_store_full_at_the_record(scene: Scene) -> None:
    scene.spoil(Trouble("answer", "PUT", "/log/", 507, "InsufficientStorage", FOR_EVER))
    before = set(scene.bucket.objects)
    with pytest.raises(StoreError, match=r"run-a/log/0+4' in s3://bucket/a.*no room"):
        scene.source.publish(scene.states[2])
    assert not any("/log/" in key for key in set(scene.bucket.objects) - before)
    scene.heals()


@pytest.mark.parametrize("row", ["wrong_bucket", "wrong_region", "expired_credentials"])
@pytest.mark.parametrize("is_json", [False, True])
def test_bad_input_refused_requests_on_the_command_line(
    proxy: Proxy, tmp_path: Path, capfd: pytest.CaptureFixture[str], row: str, is_json: bool
) -> None:
    status, code, text, hint = REFUSALS[row]
    weights, copy = tmp_path / "w.safetensors", tmp_path / "copy.safetensors"
    save_file({"w": np.arange(100, dtype=np.uint16)}, weights)
    place = ["s3://bucket/a", str(weights), "--run", "demo"]
    assert main(["sync", "publish", *place]) == 0
    assert main(["sync", "pull", place[0], str(copy), "--run", "demo"]) == 0
    before = copy.read_bytes()
    proxy.troubles += answers(status, code, text)
    for words in (["publish", *place], ["pull", place[0], str(copy), "--run", "demo"]):
        capfd.readouterr()
        assert main(["sync", *words, *(["--json"] if is_json else [])]) == 1
        shown = capfd.readouterr()
        told = json.loads(shown.out)["error"] if is_json else shown.err
        assert hint in str(told).replace("\n", " ")
        assert "s3://bucket/a" in str(told)
        assert copy.read_bytes() == before


class _Credentials(Quiet):
    """Gives the credentials that are good now, as the agent of a container does."""

    key_id = "AKIDFIRST"
    num_asked = 0

    def do_GET(self) -> None:
        type(self).num_asked += 1
        ends = datetime.now(UTC) + timedelta(seconds=30)
        given = {
            "AccessKeyId": self.key_id,
            "SecretAccessKey": SECRET,
            "Token": "token-not-for-eyes",
            "Expiration": ends.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        self.answer(200, json.dumps(given).encode(), content_type="application/json")


def test_bad_input_credentials_that_expire_while_running(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Those that obstore fetches by itself are fetched anew: nobody has to start again."""
    good = ["AKIDFIRST"]

    class Checks(Quiet):
        """The bucket behind a look at the key of each request."""

        def _route(self) -> None:
            data = self.body()
            if f"Credential={good[0]}/" not in self.headers.get("authorization", ""):
                self.fail(400, "ExpiredToken")
                return
            inner.handle(self, data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _route  # noqa: N815

    inner = _Forward(bucket.endpoint)
    handler = type("Given", (_Credentials,), {})
    with serve(handler) as agent, serve(Checks) as endpoint:
        for name, value in s3_settings(endpoint).items():
            monkeypatch.setenv(name, value)
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        (tmp_path / "token").write_text("token-of-the-container")
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{agent}/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        store = ObjectStore("s3://bucket/a", timeout_s=5.0, retry_s=0.1)
        states = history(2)
        source = Publisher(store, RUN, threads=1, timeout_s=0.5)
        source.publish(states[0])
        good[0] = "AKIDSECOND"
        with pytest.raises(StoreError, match="the credentials have expired: get new ones"):
            source.publish(states[1])
        assert source.version == 0
        handler.key_id = "AKIDSECOND"
        end_s = time.monotonic() + 20.0
        while source.version == 0:  # obstore asks for them once in 0.1 s at most
            with suppress(StoreError):
                source.publish(states[1])
            assert time.monotonic() < end_s
        assert handler.num_asked > 1
        live = zeros_like(states[0])
        reader(store, live).pull()
        assert_same(live, states[1])


def test_bad_input_credentials_of_the_environment_that_expire_while_running(
    scene: Scene,
) -> None:
    """Those stay as they were read: a new store, with the snapshot adopted, goes on."""
    scene.spoil(*(t for t in answers(400, "ExpiredToken") if t.method != "HEAD"))
    scene.publish_fails("credentials have expired", "run-a/objects/")
    again = Publisher(
        ObjectStore("s3://bucket/a", timeout_s=2.0), RUN, threads=1, anchor_ratio=100.0
    )
    assert again.adopt(scene.states[1])
    assert again.publish(scene.states[2]).kind == "delta"
    assert scene.follower.pull().version == 2
    assert_same(scene.live, scene.states[2])


def test_bad_input_object_missing(scene: Scene) -> None:
    name = scene.objects[1]
    body = scene.bucket.objects.pop(name)
    scene.pull_fails(ChainError, r"version 1 .*is lost: .*no such object", name.removeprefix("a/"))
    scene.bucket.objects[name] = body
    scene.heals()


@pytest.mark.parametrize("is_same_size", [False, True])
def test_bad_input_object_swapped_for_an_older_one(scene: Scene, is_same_size: bool) -> None:
    old, name = scene.objects
    body = scene.bucket.objects[name].body
    older = scene.bucket.objects[old].body
    if is_same_size:
        older = (older * (len(body) // len(older) + 1))[: len(body)]
    scene.bucket.objects[name] = Held(older, {})
    match = "has SHA-256 .*damaged bytes" if is_same_size else "has .* bytes, its record says"
    scene.pull_fails(ChainError, match, name.removeprefix("a/"))
    scene.bucket.objects[name] = Held(body, {})
    scene.heals()


def test_bad_input_record_swapped_for_an_older_one(scene: Scene) -> None:
    """The record of version 1 is that of version 0 again."""
    old, new = (f"a/{KEYS.record(seq)}" for seq in (2, 3))
    body = scene.bucket.objects[new]
    scene.bucket.objects[new] = scene.bucket.objects[old]
    for _ in range(2):
        assert scene.follower.pull().kind == "nothing"
        assert_same(scene.live, scene.states[0])
    fresh = zeros_like(scene.states[0])
    reader(ObjectStore("s3://bucket/a"), fresh, timeout_s=0.3).pull()
    assert_same(fresh, scene.states[0])
    scene.bucket.objects[new] = body
    scene.heals()


@pytest.mark.parametrize("seq", [0, 1, 2**40])
def test_bad_input_hint_that_was_rolled_back(scene: Scene, seq: int) -> None:
    """It is advice: nobody goes back, or waits, because of it."""
    scene.follower.pull()
    hint = HintRecord(1, RUN, max(seq, 1), 0, "0" * 64, 1)
    scene.bucket.objects[f"a/{KEYS.hint}"] = Held(encode(hint) if seq else b"junk", {})
    assert scene.follower.pull().kind == "nothing"
    assert_same(scene.live, scene.states[1])
    assert scene.source.publish(scene.states[2]).version == 2
    scene.bucket.objects[f"a/{KEYS.hint}"] = Held(encode(hint) if seq else b"junk", {})
    assert scene.follower.pull().version == 2
    assert_same(scene.live, scene.states[2])


@pytest.mark.parametrize("mac", ["", "0" * 64])
def test_bad_input_unsigned_record(bucket: Bucket, proxy: Proxy, mac: str) -> None:
    scene = scene_of(bucket, proxy, KEY)
    name = f"a/{KEYS.record(3)}"
    signed = scene.bucket.objects[name]
    forged = re.sub(rb'"mac":"[0-9a-f]*"', b'"mac":"%s"' % mac.encode(), signed.body)
    scene.bucket.objects[name] = Held(forged, {})
    match = (
        "made with another key" if mac else "the record is not signed, but this reader has a key"
    )
    scene.pull_fails(FormatError, match, KEYS.record(3))
    scene.bucket.objects[name] = signed
    scene.heals()


HOSTILE_NAMES = [
    *(".x", "a b", "%2e%2e%2fx", "..\\x", "~", "$HOME", "x" * 900, "x/" * 600 + "x"),
    *("\u00e9\u202e\U0001f600", "9" * 20, "\u0661" * 20),
]
"""What somebody put below a folder of the run, and obstore takes."""


@pytest.mark.parametrize("folder", ["log", "floors", "readers", "objects"])
def test_bad_input_hostile_names_in_lists(scene: Scene, folder: str) -> None:
    """They are no keys: nobody reads, writes or deletes them, or goes elsewhere."""
    hostile = {f"a/{RUN}/{folder}/{name}": Held(b"hostile", {}) for name in HOSTILE_NAMES}
    scene.bucket.objects |= hostile
    scene.bucket.requests.clear()
    scene.heals()
    again = Publisher(ObjectStore("s3://bucket/a"), RUN, threads=1, keep=1)
    again.publish(scene.states[1])
    live = zeros_like(scene.states[0])
    reader(ObjectStore("s3://bucket/a"), live).pull()
    assert_same(live, scene.states[1])
    assert all(scene.bucket.objects[key] is held for key, held in hostile.items())
    asked = [asked for method, asked in scene.bucket.requests if method != "GET" or asked]
    assert all(re.fullmatch(r"(a/run-a/[A-Za-z0-9._/-]+)?", asked) for asked in asked)


@pytest.mark.parametrize(
    "name",
    [
        *(b"a/run-a/log//x", b"a/run-a/log/../x", b"a/run-a/log/./x", b"a/run-a/log/a\tb"),
        *(b"a/run-a/log/\x01\x1b[2J", b"a/run-a/log/\xff\xfe", b"a/run-a/log/&#0;"),
    ],
)
def test_bad_input_names_that_are_none_in_lists(scene: Scene, name: bytes) -> None:
    """Empty parts, control characters and what is no UTF-8: the list is refused in one sentence."""
    rows = b"<Contents><Key>%s</Key><Size>1</Size>" % name
    rows += b"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>x</ETag></Contents>"
    page = b"<ListBucketResult><IsTruncated>false</IsTruncated>%s</ListBucketResult>" % rows
    scene.spoil(Trouble("say", "GET", "list-type", 200, body=page, count=FOR_EVER))
    fresh = reader(ObjectStore("s3://bucket/a", retry_s=0.1), zeros_like(scene.states[0]))
    try:
        with pytest.raises(StoreError, match=r"list 'run-a/.*' in s3://bucket/a") as caught:
            fresh.pull()
    finally:
        fresh.close()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400
    assert_same(scene.live, scene.states[0])
    scene.heals()


@pytest.mark.parametrize("part", ["/objects/", "/log/"])
@pytest.mark.parametrize("kind", ["endless", "lie"])
def test_bad_input_endless_object(scene: Scene, part: str, kind: str) -> None:
    """A body that never ends, or a length that is not the true one."""
    scene.spoil(*(Trouble(kind, method, part, count=FOR_EVER) for method in ("GET", "HEAD")))
    before = scene.written()
    with pytest.raises(GymfastError) as caught:
        scene.follower.pull()
    assert f"{RUN}{part}" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert scene.follower.version == 0
    assert_same(scene.live, scene.states[0])
    assert scene.written() == before
    scene.heals()


@pytest.mark.parametrize("kind", ["short", "shifted", "whole", "cut"])
def test_bad_input_truncated_range(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Fewer bytes than asked for, another range, all bytes in place of a range, half a body."""
    monkeypatch.setattr("gymfast.sync.objects._READ_BYTES", 512)  # so that it is read in ranges
    scene.spoil(Trouble(kind, "GET", "/objects/", count=FOR_EVER))
    scene.pull_fails(DeadlineError, "bytes were cut on the way|does not serve ranges", "/objects/")
    scene.heals()


class _Forward:
    """Hands requests on to another server."""

    def __init__(self, endpoint: str) -> None:
        self.host = endpoint.removeprefix("http://")

    def handle(self, asked: Quiet, data: bytes) -> None:
        connection = http.client.HTTPConnection(self.host, timeout=60)
        try:
            connection.request(asked.command, asked.path, data, dict(asked.headers.items()))
            reply = connection.getresponse()
            body = reply.read()
            skipped = ("content-length", "connection", "date", "server")
            headers = {n: v for n, v in reply.getheaders() if n.lower() not in skipped}
            length = reply.getheader("content-length", "0")
            asked.answer(reply.status, body, content_length=length, **headers)
        finally:
            connection.close()


def test_bad_input_many_at_once_leave_the_reader_serving(scene: Scene) -> None:
    """Readers of the same store see nothing of each other's trouble."""
    others = [reader(ObjectStore("s3://bucket/a"), copy_of(scene.states[0])) for _ in range(3)]
    scene.spoil(Trouble("flip", "GET", "/objects/", count=1))
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(Subscriber.pull, others))
    assert [other.version for other in others] == [1, 1, 1]
