"""The environment variables of gymfast: one table, read by `gymfast env` and checked by a test."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """An environment variable; `flag` is the option that goes before it, if there is one."""

    name: str
    default: str
    meaning: str
    flag: str = ""


SETTINGS = (
    Setting("GYMFAST_ADMISSION", "", "1: the plug-in of SGLang admits requests by version"),
    Setting("GYMFAST_CPU", "best found", "instruction set: baseline, avx2, avx512"),
    Setting("GYMFAST_FRESHNESS_S", "no limit", "age at which an engine is not ready any more"),
    Setting("GYMFAST_READER", "name of the host", "how names of readers of a run begin"),
    Setting("GYMFAST_THREADS", "all cores", "threads of the codec", "--threads"),
    Setting("GYMFAST_RELAY_KEY_FILE", "", "file with the key of a store relay://HOST:PORT"),
    Setting("GYMFAST_REPORT_S", "30", "seconds between two statuses of a reader, 0: none"),
    Setting("GYMFAST_RUN", "", "run that the hooks for slime use"),
    Setting("GYMFAST_STORE", "", "store that the hooks for slime use"),
    Setting(
        "GYMFAST_STORE_CARRY", "changes", "what these hooks put: changes, or files as they are"
    ),
    Setting("GYMFAST_STORE_WAIT_S", "30", "seconds they wait for what a store shows late"),
    Setting("GYMFAST_TRACEBACK", "", "1: show the traceback of an error"),
)


def find_unknown() -> list[tuple[str, str]]:
    """Names of set GYMFAST_* variables that gymfast does not read, each with a hint (or "")."""
    known = [setting.name for setting in SETTINGS]
    unknown = sorted({name for name in os.environ if name.startswith("GYMFAST_")} - set(known))
    return [(name, _hint(name, known)) for name in unknown]


def _hint(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""
