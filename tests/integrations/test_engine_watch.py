"""What an engine serves, from each order of the calls that its trainers make."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gymfast.integrations.admission_rules import (
    Constraint,
    Served,
    constraint_of,
    decide,
    mixed,
    take_constraint,
)
from gymfast.integrations.engine_calls import Ends
from gymfast.integrations.engine_watch import EngineWatch
from gymfast.integrations.sglang_messages import LOADER, RECORD
from gymfast.integrations.vllm_ranks import FLAGGED
from gymfast.sync import State

OURS = {"serialized_named_tensors": ["A" * 200_000], "load_format": LOADER, "flush_cache": False}
OTHER = {"serialized_named_tensors": ["A" * 200_000], "load_format": None}
Call = tuple[str, Any, int, Any]


def run(watch: EngineWatch, *calls: Call) -> Served:
    """What is served after the calls: path, body, status and answer of each."""
    for path, body, status, answer in calls:
        request, said = Ends(), Ends()
        token = watch.begin(path)
        data = json.dumps(body).encode()
        for start in range(0, len(data), 1 << 14):
            request.add(data[start : start + (1 << 14)])
        said.add(json.dumps(answer).encode())
        watch.end(token, request.data, status or None, said.data)
    return watch.served


def ok(path: str, **body: Any) -> Call:
    return path, body, 200, {"success": True}


def sglang(body: dict[str, Any], **more: Any) -> Call:
    return ok("/update_weights_from_tensor", **body, **more)


PAUSE, GO_ON = ok("/pause_generation", mode="retract"), ok("/continue_generation")


def test_sglang_serves_the_version_that_is_confirmed() -> None:
    watch = EngineWatch()
    under_way = run(watch, PAUSE, sglang(OURS), sglang(OURS))
    assert (under_way.state, under_way.version) == (State.FILLING, None)
    assert run(watch, sglang(OURS, weight_version="7")).is_paused
    served = run(watch, GO_ON)
    assert (served.exact, served.problem) == (7, "")


def test_sglang_that_refuses_goes_on_with_the_old_version() -> None:
    watch = EngineWatch()
    run(watch, PAUSE, sglang(OURS, weight_version="7"), GO_ON)
    assert run(watch, PAUSE, sglang(OURS)).exact is None
    assert run(watch, GO_ON).exact == 7


def test_parts_over_a_group_are_loaded_as_they_come() -> None:
    parts = ok("/update_weights_from_distributed", names=[RECORD, "w"], group_name="update")
    watch = EngineWatch()
    run(watch, PAUSE, sglang(OURS, weight_version="7"), GO_ON)
    assert run(watch, PAUSE, parts, sglang(OURS, weight_version="8"), GO_ON).exact == 8
    served = run(watch, PAUSE, parts, parts, sglang(OURS), GO_ON)
    assert (served.state, served.version) == (State.EMPTY, None), "refused after it was loaded"


@pytest.mark.parametrize("is_paused", [True, False])
def test_weights_of_another_trainer_have_no_known_version(is_paused: bool) -> None:
    watch = EngineWatch()
    run(watch, PAUSE, sglang(OURS, weight_version="7"), GO_ON)
    calls = [PAUSE, sglang(OTHER), GO_ON] if is_paused else [sglang(OTHER)]
    served = run(watch, *calls)
    assert (served.state, served.version) == (State.EMPTY, None)
    assert run(watch, ok("/update_weight_version", new_version="8")).exact == 8


def test_weights_of_another_trainer_that_names_its_version_have_it() -> None:
    watch = EngineWatch()
    body = {"names": ["w"], "weight_version": "9"}
    calls = [ok("/update_weights_from_distributed", **body)] * 3
    assert run(watch, PAUSE, *calls, GO_ON).exact == 9


@pytest.mark.parametrize("status", [0, 400, 500, 502])
def test_another_trainer_that_fails_leaves_anything(status: int) -> None:
    watch = EngineWatch()
    run(watch, PAUSE, sglang(OURS, weight_version="7"), GO_ON)
    failed = ("/update_weights_from_disk", {"model_path": "/x"}, status, {"success": False})
    served = run(watch, PAUSE, failed)
    assert (served.state, served.exact) == (State.INCONSISTENT, None)
    assert run(watch, GO_ON).state is State.INCONSISTENT
    assert run(watch, PAUSE, sglang(OURS, weight_version="8"), GO_ON).exact == 8


@pytest.mark.parametrize("status", [0, 500])
def test_an_update_half_way_is_not_relied_on(status: int) -> None:
    watch = EngineWatch()
    run(watch, PAUSE, sglang(OURS, weight_version="7"), GO_ON)
    failed = ("/update_weights_from_tensor", OURS, status, {})
    assert run(watch, PAUSE, sglang(OURS), failed).exact is None
    assert run(watch, GO_ON).state is State.INCONSISTENT


def test_an_answer_of_success_that_denies_it_is_none() -> None:
    watch = EngineWatch()
    denied = ("/update_weights_from_tensor", OURS | {"weight_version": "7"}, 200)
    assert run(watch, PAUSE, (*denied, {"success": False})).exact is None


@pytest.mark.parametrize("where", ["/update_weights", "/finish_weight_update"])
def test_vllm_that_is_flagged_serves_nothing(where: str) -> None:
    watch = EngineWatch()
    calls = [ok("/pause"), ok("/update_weights", update_info={"version": 7})]
    run(watch, *calls, ok("/finish_weight_update", weight_version="7"), ok("/resume"))
    assert watch.served.exact == 7
    body = {"update_info": {"version": 8}}
    steps = [ok("/pause"), ok("/update_weights", **body), ok("/finish_weight_update")]
    steps = [s for s in steps if s[0] != where] + [(where, body, 500, {"error": FLAGGED})]
    assert run(watch, *steps).state is State.INCONSISTENT
    assert run(watch, ok("/resume")).state is State.INCONSISTENT


def test_vllm_that_resumes_with_weights_nobody_named_has_no_version() -> None:
    watch = EngineWatch()
    served = run(watch, ok("/pause"), ok("/update_weights", update_info={"version": 7}))
    assert served.problem == "an update is under way"
    assert run(watch, ok("/resume")).problem == "no version is served yet"


def test_a_name_in_a_sound_engine_is_taken_and_in_a_broken_one_not() -> None:
    watch = EngineWatch()
    assert run(watch, ok("/update_weight_version", new_version="3")).exact == 3
    run(watch, ("/update_weights", {"update_info": {"names": ["w"]}}, 500, {}))
    assert run(watch, ok("/update_weight_version", new_version="4")).exact is None


@pytest.mark.parametrize("text", ["default", "7a", "-1", "1" * 17, ""])
def test_a_version_that_is_no_number_is_none(text: str) -> None:
    assert run(EngineWatch(), ok("/update_weight_version", new_version=text)).exact is None


def test_only_the_ends_of_a_body_are_kept() -> None:
    ends = Ends()
    for _ in range(1000):
        ends.add(b"a" * 10_000)
    ends.add(b"z")
    assert len(ends.data) == 128 << 10 and ends.data.endswith(b"z")


def test_age_and_freshness_are_those_of_the_version() -> None:
    now_s = 5.0
    watch = EngineWatch(10.0, lambda: now_s)
    run(watch, ok("/update_weight_version", new_version="3"))
    now_s = 15.0
    assert (watch.served.age_s, watch.served.is_stale) == (10.0, False)
    now_s = 15.5
    assert watch.served.is_stale


def test_every_state_and_constraint_has_one_decision() -> None:
    asked = [Constraint(), Constraint(min_version=5), Constraint(exact_version=5)]
    for state in State:
        for version in (None, 4, 5, 6):
            for paused in (True, False):
                served = Served(state, version, paused)
                for constraint in asked:
                    refusal = decide(constraint, served)
                    if refusal is None and constraint:
                        assert state is State.CLEAN and not paused and version is not None
                        exact = constraint.exact_version
                        assert version == exact if exact is not None else version >= 5
                    elif refusal is None:
                        assert state not in (State.INCONSISTENT, State.HEALING)
                    else:
                        assert refusal.text and (refusal.retry_s > 0) is refusal.is_retryable


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b'["weight_version"]',
        b'{"weight_version": null}',
        b'{"a": {"weight_version": {"min_version": 1}}}',
        b"\xff\xfe" + b"\0",
        b"[" * 100_000 + b"\\u0077",
        b'{"prompt": "the \\"weight_version\\" field"}',
    ],
)
def test_other_bodies_go_to_the_engine_as_they_are(body: bytes) -> None:
    assert take_constraint(body) == (Constraint(), body)


def test_the_rest_of_a_body_keeps_its_bytes() -> None:
    body = b'{"a":1.10,"weight_version":{"min_version":3},"b":"\\u00e9","c":[1e400, NaNs]}'
    assert take_constraint(body.replace(b", NaNs", b"")) == (
        Constraint(min_version=3),
        b'{"a":1.10,"b":"\\u00e9","c":[1e400]}',
    )


@pytest.mark.parametrize("text", ["", "1.0", "0x1", "-1", "1" * 17, "٣"])
def test_headers_that_name_no_version_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a version"):
        constraint_of([("x-gymfast-min-version", text)])


def test_a_header_that_is_given_twice_is_refused() -> None:
    header = ("x-gymfast-exact-version", "7")
    with pytest.raises(ValueError, match="given twice"):
        constraint_of([header, header])


ASKED = b'{"prompt": "a", "weight_version": {"exact_version": 3}}'


@pytest.mark.parametrize(
    "body",
    [
        ASKED,
        b"\xef\xbb\xbf" + ASKED,
        ASKED.decode().encode("utf-16"),
        ASKED.replace(b"weight_", b"weight\\u005f"),
        ASKED.replace(b'"a"', b"NaN"),
        ASKED.replace(b'"a"', b'"\\ud800"'),
    ],
)
def test_what_an_engine_reads_is_read(body: bytes) -> None:
    constraint, rest = take_constraint(body)
    assert constraint == Constraint(exact_version=3)
    assert list(json.loads(rest)) == ["prompt"]


@pytest.mark.parametrize(
    "body",
    [
        b'{"weight_version"',
        b'{"weight_version": "7"}',
        b'{"weight_version": 7}',
        b'{"weight_version": [7]}',
        b'{"weight_version": {}}',
        b'{"prompt": "\xe9", "weight_version": {"exact_version": 3}} x',
        b"[" * 100_000 + b'"weight_version"',
    ],
)
def test_a_body_that_may_ask_for_a_version_is_not_passed_on_unread(body: bytes) -> None:
    with pytest.raises(ValueError, match="weight_version"):
        take_constraint(body)


def clean(version: int | None, num_changes: int = 1) -> Served:
    return Served(State.EMPTY if version is None else State.CLEAN, version, num_changes=num_changes)


def test_only_an_exact_request_minds_an_update_that_came_while_it_ran() -> None:
    assert mixed(Constraint(min_version=1), clean(1), clean(2, 2)) is None
    assert mixed(Constraint(exact_version=1), clean(1), clean(1)) is None
    for end, may_come in ((2, False), (None, True)):
        refusal = mixed(Constraint(exact_version=1), clean(1), clean(end, 2))
        assert refusal is not None and refusal.is_retryable is may_come


def test_a_version_that_went_and_came_back_is_not_the_same() -> None:
    watch = EngineWatch()
    start = run(watch, sglang(OTHER, weight_version="7"))
    run(watch, ("/update_weights_from_disk", {}, 500, {}))
    end = run(watch, sglang(OTHER, weight_version="7"))
    assert (start.exact, end.exact, end.exact_since(start)) == (7, 7, None)
    refusal = mixed(Constraint(exact_version=7), start, end)
    assert refusal is not None and refusal.is_retryable


def test_a_refusal_names_no_version_of_weights_that_may_be_anything() -> None:
    watch = EngineWatch()
    run(watch, sglang(OTHER, weight_version="7"))
    refusal = decide(Constraint(), run(watch, ("/update_weights_from_disk", {}, 500, {})))
    assert refusal is not None and refusal.served_version is None


BUCKET = "/update_weights_from_distributed"


def end(watch: EngineWatch, call: Any, body: Any, status: int) -> Served:
    answer = json.dumps({"success": status == 200}).encode()
    watch.end(call, json.dumps(body).encode(), status, answer)
    return watch.served


@pytest.mark.parametrize("refused", [401, 404, 422])
@pytest.mark.parametrize("is_stranger_first", [True, False])
def test_a_call_that_is_refused_while_weights_load_says_nothing_about_them(
    refused: int, is_stranger_first: bool
) -> None:
    watch = EngineWatch()
    run(watch, sglang(OTHER, weight_version="7"))
    calls = [watch.begin(BUCKET), watch.begin(BUCKET)]
    stranger, real = calls if is_stranger_first else reversed(calls)
    assert end(watch, stranger, {}, refused).state is State.APPLYING
    assert end(watch, real, {"weight_version": "8"}, 200).exact == 8


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_calls_that_are_all_refused_leave_the_old_version(order: list[int]) -> None:
    watch = EngineWatch()
    run(watch, sglang(OTHER, weight_version="7"))
    calls = [watch.begin(BUCKET), watch.begin(BUCKET)]
    for index in order:
        assert watch.served.state is State.APPLYING
        end(watch, calls[index], {}, 404)
    assert watch.served.exact == 7


@pytest.mark.parametrize("is_stranger_last", [True, False])
def test_loads_side_by_side_are_served_when_the_last_has_ended(is_stranger_last: bool) -> None:
    watch = EngineWatch()
    calls = [watch.begin(BUCKET), watch.begin(BUCKET)]
    assert end(watch, calls[0], {"weight_version": "8"}, 200).state is State.FILLING
    last = 404 if is_stranger_last else 200
    assert end(watch, calls[1], {"weight_version": "8"}, last).exact == 8


def test_a_load_that_ran_beside_a_failure_does_not_heal() -> None:
    watch = EngineWatch()
    first, second = watch.begin(BUCKET), watch.begin(BUCKET)
    end(watch, first, {}, 500)
    third = watch.begin(BUCKET)
    assert end(watch, second, {"weight_version": "8"}, 200).state is State.INCONSISTENT
    assert end(watch, third, {"weight_version": "8"}, 200).state is State.INCONSISTENT


def test_a_stray_call_between_the_calls_of_an_update_is_ignored() -> None:
    watch = EngineWatch()
    stray = ("/update_weights_from_disk", {}, 404, {})
    run(watch, ok("/pause"), ok("/update_weights", update_info={"names": ["w"]}), stray)
    assert watch.served.problem == "an update is under way"
    assert run(watch, ok("/finish_weight_update", weight_version="8"), ok("/resume")).exact == 8


@pytest.mark.parametrize("statuses", [(200, 400, None), (200, 500, 200), (500, 200, 200)])
@pytest.mark.parametrize("fields", [{}, {"weight_version": "8"}])
def test_a_later_bucket_of_a_broken_update_does_not_heal(
    statuses: tuple[int | None, ...], fields: dict[str, str]
) -> None:
    watch = EngineWatch()
    run(watch, sglang(OTHER, weight_version="7"), PAUSE)
    for status in filter(None, statuses):
        run(watch, (BUCKET, fields, status, {"success": status == 200}))
    for call in (ok("/update_weight_version", new_version="8"), GO_ON):
        assert run(watch, call).state is State.INCONSISTENT
    repair = ok(BUCKET, weight_version="9")
    assert run(watch, PAUSE, repair, GO_ON).exact == 9, "a whole update heals"


def test_buckets_with_a_version_are_served_when_the_pause_ends() -> None:
    watch = EngineWatch()
    bucket = ok(BUCKET, weight_version="8")
    assert run(watch, PAUSE, bucket).state is State.FILLING
    assert run(watch, ok("/update_weight_version", new_version="8")).exact is None
    assert run(watch, bucket, bucket).exact is None
    assert run(watch, GO_ON).exact == 8


@pytest.mark.parametrize("status", [0, 400, 500])
@pytest.mark.parametrize("path", ["/finish_weight_update", "/end_weight_update"])
def test_an_update_whose_end_fails_leaves_anything(path: str, status: int) -> None:
    watch = EngineWatch()
    run(watch, ok("/update_weight_version", new_version="7"), ok("/pause"))
    run(watch, ok("/update_weights", update_info={"names": ["w"]}))
    assert run(watch, (path, {}, status, {}), ok("/resume")).state is State.INCONSISTENT


def test_an_end_without_an_update_changes_nothing() -> None:
    watch = EngineWatch()
    run(watch, ok("/update_weight_version", new_version="7"))
    assert run(watch, ("/end_weight_update", {}, 400, {})).exact == 7


def test_an_update_that_was_begun_and_left_has_no_version() -> None:
    watch = EngineWatch()
    run(watch, ok("/update_weight_version", new_version="7"), ok("/pause"))
    kept = ok("/start_weight_update", is_checkpoint_format=False)
    assert run(watch, kept, ok("/resume")).exact == 7, "our updates change nothing there"
    assert run(watch, ok("/pause"), ok("/start_weight_update")).exact is None
    assert run(watch, ok("/resume")).state is State.EMPTY


def test_weights_that_a_check_overwrote_are_not_served() -> None:
    watch = EngineWatch()
    run(watch, ok("/update_weight_version", new_version="7"))
    assert run(watch, ok("/weights_checker", action="checksum")).exact == 7
    assert run(watch, ok("/weights_checker", action="reset_tensors")).state is State.INCONSISTENT
