"""What rank 0 of a trainer makes of what servers say; test_slime_group_deltas has the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gymfast.errors import ChainError, ChannelError, FormatError
from gymfast.integrations import part_engines
from gymfast.integrations.engines import EngineError
from gymfast.integrations.part_engines import PartEngines
from gymfast.integrations.sglang_messages import Parts, Status
from gymfast.integrations.sglang_session import RefusedError

VERSION = Parts("3", "a" * 64, are_loaded=False)


class Client:
    """A server; what a test puts into `answers` by a method's name is returned or raised."""

    answers: dict[str, Any] = {}

    def __init__(self, url: str, *, timeout_s: float) -> None:
        self.url = url

    def session(self) -> Any:
        has_draft = self.answer("has_draft", False)
        steps = {name: lambda name=name: self.answer(name, None) for name in ("begin", "end")}
        return SimpleNamespace(has_draft=has_draft, **steps)

    def greet(self, session: Any) -> None:
        self.answer("greet", None)

    def status(self) -> Status:
        return self.answer("status", Status("id", root=VERSION.root, version="3"))

    def load_parts(self, session: Any, parts: Parts) -> Status:
        return self.answer("load", Status("id", root=parts.root, version=parts.version))

    def answer(self, name: str, usual: Any) -> Any:
        found = self.answers.get(name, usual) if self.url == "b" else usual
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Those of the second of two servers."""
    monkeypatch.setattr(part_engines, "SGLangClient", Client)
    monkeypatch.setattr(Client, "answers", {})
    return Client.answers


def engines() -> PartEngines:
    return PartEngines(["a", "b"], 5, ends_sessions=True)


def test_engines_that_hold_the_version_take_what_changed(answers: dict[str, Any]) -> None:
    found = engines()
    assert found.begin() == ""
    assert found.why_not(None) == "no version was acknowledged"
    assert found.why_not(VERSION) == ""
    assert found.load(VERSION) == ""
    found.end()


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (Status("id", root="b" * 64, version="3"), "b holds version 3, version 3 was acknowledged"),
        (Status("id", root=VERSION.root, version="2"), "b holds version 2, version 3 was"),
        (Status("id"), "b holds no version, version 3 was acknowledged"),
    ],
)
def test_an_engine_that_holds_something_else_is_named(
    status: Status, text: str, answers: dict[str, Any]
) -> None:
    answers["status"] = status
    found = engines()
    assert found.begin() == ""
    assert text in found.why_not(VERSION)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"begin": RefusedError("asleep")}, "b: asleep"),
        ({"status": FormatError("no status of gymfast")}, "b: no status of gymfast"),
        ({"status": Status("", "the trainer speaks protocol 3")}, "the trainer speaks protocol 3"),
    ],
)
def test_a_loader_that_is_not_to_be_had_says_why(
    wrong: dict[str, Any], text: str, answers: dict[str, Any]
) -> None:
    answers |= wrong
    assert engines().begin() == text


def test_a_refused_version_says_why_and_another_one_is_not_believed(
    answers: dict[str, Any],
) -> None:
    answers["load"] = ChainError("goes on as before: another base")
    assert engines().load(VERSION) == "goes on as before: another base"
    answers["load"] = Status("id", root="b" * 64, version="3")
    assert engines().load(VERSION) == "b acknowledges version 3, bbbbbbbbbbbbbbbb…"


@pytest.mark.parametrize(
    ("wrong", "step", "text"),
    [
        ("greet", lambda found: found.begin(), "failed at begin_weight_update: away"),
        ("load", lambda found: found.load(VERSION), "failed at update_weights_from_tensor: away"),
        ("end", lambda found: (found.begin(), found.end()), "failed at end_weight_update: away"),
    ],
)
def test_an_engine_that_does_not_answer_is_an_error(
    wrong: str, step: Any, text: str, answers: dict[str, Any]
) -> None:
    answers[wrong] = ChannelError("away")
    with pytest.raises(EngineError, match=f"engine 1 of 2 {text}"):
        step(engines())


@pytest.mark.parametrize("url", ["", None])
def test_an_engine_without_an_address_has_no_loader(url: Any, answers: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="engine 1 of 2 failed at /server_info: its handle does"):
        PartEngines(["a", url], 5, ends_sessions=True)


def test_a_draft_model_is_left_alone(answers: dict[str, Any]) -> None:
    answers["has_draft"] = True
    with pytest.raises(EngineError, match="engine 1 of 2 failed at /server_info: b has a draft"):
        engines()
