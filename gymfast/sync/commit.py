"""How a publisher commits a record and claims its epoch: two pure tables.

`publisher.py` and `epoch.py` drive them with a store; tests/sync/explorer.py drives the same
tables through every interleaving, crash and lost reply.

Source: docs/sync-protocol.md sections 5 and 6.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum

from gymfast.sync.manifest import LogRecord


class Step(Enum):
    """What the writer does next; the second group ends the attempt."""

    PUT = "put the objects"
    CONFIRM = "confirm that each object is there with its length; if not, see who took the place"
    CREATE = "create the record, only if absent"
    READ_BACK = "read the record back"
    ADVANCE = "follow the record found there, then try the next place"

    DONE = "the record is committed: promote the snapshot"
    ADOPT = "an earlier attempt of this publisher is committed there: follow it, then start again"
    FENCED = "a newer publisher is in charge: stop for ever"
    FAILED = "nothing was committed, or nobody knows: roll the snapshot back"


FINAL = frozenset({Step.DONE, Step.ADOPT, Step.FENCED, Step.FAILED})


class Answer(Enum):
    """What the store answered."""

    OK = "ok"
    EXISTS = "exists"  # create-only: somebody was first
    ERROR = "error"  # failed, or the answer was lost: the effect is unknown
    ABSENT = "absent"
    MINE = "mine"  # the record of this very attempt
    EARLIER = "earlier"  # a record of this publisher, from an earlier attempt
    OTHER = "other"  # a record of another publisher
    GIVE_UP = "give up"  # the deadline has passed


COMMIT: dict[tuple[Step, Answer], Step] = {
    (Step.PUT, Answer.OK): Step.CONFIRM,
    (Step.PUT, Answer.ERROR): Step.FAILED,
    (Step.PUT, Answer.GIVE_UP): Step.FAILED,
    (Step.CONFIRM, Answer.OK): Step.CREATE,
    (Step.CONFIRM, Answer.ERROR): Step.CONFIRM,
    (Step.CONFIRM, Answer.ABSENT): Step.CONFIRM,
    (Step.CONFIRM, Answer.EARLIER): Step.ADOPT,
    (Step.CONFIRM, Answer.OTHER): Step.FENCED,
    (Step.CONFIRM, Answer.GIVE_UP): Step.FAILED,
    (Step.CREATE, Answer.OK): Step.DONE,
    (Step.CREATE, Answer.EXISTS): Step.READ_BACK,
    (Step.CREATE, Answer.ERROR): Step.READ_BACK,
    (Step.CREATE, Answer.GIVE_UP): Step.FAILED,
    (Step.READ_BACK, Answer.MINE): Step.DONE,
    (Step.READ_BACK, Answer.EARLIER): Step.ADOPT,
    (Step.READ_BACK, Answer.OTHER): Step.FENCED,
    (Step.READ_BACK, Answer.ABSENT): Step.CREATE,
    (Step.READ_BACK, Answer.ERROR): Step.READ_BACK,
    (Step.READ_BACK, Answer.GIVE_UP): Step.FAILED,
}

CLAIM: dict[tuple[Step, Answer], Step] = {
    (Step.CREATE, Answer.OK): Step.DONE,
    (Step.CREATE, Answer.EXISTS): Step.READ_BACK,
    (Step.CREATE, Answer.ERROR): Step.READ_BACK,
    (Step.CREATE, Answer.GIVE_UP): Step.FAILED,
    (Step.READ_BACK, Answer.MINE): Step.DONE,
    (Step.READ_BACK, Answer.EARLIER): Step.ADVANCE,
    (Step.READ_BACK, Answer.OTHER): Step.ADVANCE,
    (Step.READ_BACK, Answer.ABSENT): Step.CREATE,
    (Step.READ_BACK, Answer.ERROR): Step.READ_BACK,
    (Step.READ_BACK, Answer.GIVE_UP): Step.FAILED,
    (Step.ADVANCE, Answer.OK): Step.CREATE,
    (Step.ADVANCE, Answer.ABSENT): Step.CREATE,
    (Step.ADVANCE, Answer.ERROR): Step.ADVANCE,
    (Step.ADVANCE, Answer.GIVE_UP): Step.FAILED,
}


def classify(found: LogRecord, nonce: str, earlier: Collection[str]) -> Answer:
    """Whose record lies where the attempt `nonce` wanted to be.

    `earlier` are the nonces of all attempts of this publisher for that place: one that was given up
    may still have been carried out.
    """
    if found.nonce == nonce:
        return Answer.MINE
    return Answer.EARLIER if found.nonce in earlier else Answer.OTHER
