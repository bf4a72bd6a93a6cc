"""Traffic while an engine is updated: no answer is of other weights than it says."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from gymfast.integrations.admission import Admission
from gymfast.integrations.vllm_ranks import FLAGGED


class Engine:
    """Weights change in /update_weights; a pause keeps what runs, and holds what comes."""

    def __init__(self, chance: random.Random) -> None:
        self.live = "start"
        self._chance = chance
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        fields, path, status, answer = json.loads(body or b"{}"), scope["path"], 200, {}
        if path == "/pause":
            self._may_run.clear()
        elif path == "/resume":
            self._may_run.set()
        elif path == "/update_weights":
            status, answer = await self._update(fields["update_info"]["version"])
        elif path == "/v1/completions":
            await self._may_run.wait()
            seen = [self.live]
            for _ in range(self._chance.randrange(4)):
                await asyncio.sleep(self._chance.random() * 0.002)
                seen.append(self.live)
            answer = {"seen": seen}
        data = json.dumps(answer).encode()
        headers = [(b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})

    async def _update(self, version: int) -> tuple[int, Any]:
        kind = self._chance.random()
        if kind < 0.2:
            return 500, {"error": {"message": "version is not published"}}
        old, self.live = self.live, f"part of {version}"
        await asyncio.sleep(self._chance.random() * 0.002)
        if kind < 0.3:
            return 500, {"error": {"message": f"{FLAGGED}: {old} is gone"}}
        self.live = str(version)
        return 200, {}


class Traffic:
    """A trainer and clients of one engine behind the middleware."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.engine = Engine(self.chance)
        self.app = Admission(self.engine)
        self.newest = 0
        self.is_over = False
        self.counts: dict[tuple[str, int], int] = {}

    async def call(self, path: str, fields: Any) -> tuple[int, Any, dict[str, str]]:
        body, sent = json.dumps(fields).encode(), []
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
            ],
        }

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], json.loads(sent[1]["body"]), headers

    async def train(self, num_updates: int) -> None:
        while self.newest < num_updates:
            version = self.newest + 1
            await self.call("/pause", {})
            await asyncio.sleep(self.chance.random() * 0.002)
            status, answer, _ = await self.call("/update_weights", _update(version))
            if status == 200:
                await self.call("/finish_weight_update", {"weight_version": str(version)})
                self.newest = version
            if FLAGGED not in str(answer):
                await self.call("/resume", {})
            await asyncio.sleep(self.chance.random() * 0.004)
        self.is_over = True

    async def ask(self) -> None:
        while not self.is_over:
            await asyncio.sleep(self.chance.random() * 0.002)
            kind = self.chance.choice(["min_version", "exact_version"])
            version = max(0, self.newest + self.chance.randrange(-1, 2))
            asked = {"weight_version": {kind: version}}
            status, answer, headers = await self.call("/v1/completions", asked)
            self.counts[kind, status] = self.counts.get((kind, status), 0) + 1
            if status != 200:
                assert status in (409, 503) and "retryable" in answer
                continue
            start, end = (headers[f"x-gymfast-version-{name}"] for name in ("start", "end"))
            seen = answer["seen"]
            if kind == "exact_version":
                assert set(seen) == {str(version)} and start == end == str(version)
            else:
                assert int(start) >= version
            if start == end:
                assert set(seen) == {start}, "what an answer says is what it is of"


def _update(version: int) -> Any:
    return {"update_info": {"version": version, "is_full": False}}


def run(seed: int, num_updates: int) -> Traffic:
    traffic = Traffic(seed)

    async def all_together() -> None:
        clients = [traffic.ask() for _ in range(8)]
        await asyncio.gather(traffic.train(num_updates), *clients)

    asyncio.run(all_together())
    return traffic


def test_no_answer_is_of_other_weights_than_it_says() -> None:
    counts = run(0, 60).counts
    for kind in ("min_version", "exact_version"):
        assert min(counts[kind, status] for status in (200, 409, 503)) > 0, counts


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
def test_no_answer_of_many_is_of_other_weights_than_it_says(seed: int) -> None:
    counts = run(seed, 500).counts
    assert sum(counts.values()) > 2000
