"""The run as it happens, one line for each event, on stderr."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from gymfast.demo import events
from gymfast.demo.words import count_text, seconds_text, size_text

if TYPE_CHECKING:
    from rich.console import Console

STYLES = {"trainer": "bold", "live": "cyan", "checkpoint": "magenta", "demo": "dim"}


class Narrator:
    """Writes lines with time and speaker."""

    def __init__(self, console: Console, elapsed_s: Callable[[], float]) -> None:
        self._console = console
        self._elapsed_s = elapsed_s
        self._refused: dict[str, int | None] = {}

    def say(self, who: str, text: str, style: str = "") -> None:
        """One line of this speaker."""
        from rich.text import Text

        line = Text(f"{self._elapsed_s():6.1f} s  ", style="dim")
        line.append(f"{who:<11}", style=STYLES.get(who, ""))
        line.append(text, style=style)
        self._console.print(line, soft_wrap=True)

    def tell(self, who: str, event: events.AnyEvent) -> None:
        """The line of an event, if it deserves one; a refusal is told once, not at each retry."""
        if isinstance(event, events.Refused):
            if self._refused.get(who, -1) == event.version:
                return
            self._refused[who] = event.version
        text, style = describe(event)
        if text:
            self.say(who, text, style)


def describe(event: events.AnyEvent) -> tuple[str, str]:
    """What to say about an event, and how; an empty text means nothing."""
    match event:
        case events.TrainerReady():
            return _ready(event), ""
        case events.WarmupStep():
            return f"warm-up {event.step}/{event.num_steps}, loss {event.loss:.2f}", "dim"
        case events.Published():
            return _published(event), ""
        case events.Damaged():
            return (
                f"version {event.version}: byte {event.offset} of its stored object is flipped"
            ), "bold red"
        case events.Attached():
            return _attached(event), ""
        case events.Holding():
            return f"in the middle of writing version {event.version} into {event.at_file}", ""
        case events.Served():
            return _served(event) if event.num_versions else "", ""
        case events.Refused():
            return _refused(event), "yellow"
        case events.Failed():
            return f"{event.error}: {event.message}", "bold red"
        case events.TrainerFinished():
            return f"finished at version {event.last_version}", ""


def _ready(event: events.TrainerReady) -> str:
    return (
        f"{count_text(event.num_parameters)} parameters, {size_text(event.state_bytes)} in BF16, "
        f"text of {size_text(event.text_bytes)}"
    )


def _published(event: events.Published) -> str:
    what = f"published version {event.version}: {size_text(event.frame_bytes)}"
    if event.kind == "anchor":
        return f"{what}, all weights"
    return (
        f"{what} for {count_text(event.num_changed)} changed weights "
        f"(full {size_text(event.raw_bytes)}), in {seconds_text(event.publish_s)}"
    )


def _attached(event: events.Attached) -> str:
    if event.version is None:
        return "restarted, holds nothing" if event.is_restart else "waits for the first version"
    return f"restarted, holds version {event.version}, whole" if event.is_restart else "attached"


def _refused(event: events.Refused) -> str:
    held = "nothing" if event.version is None else f"version {event.version}"
    why = (event.warning or event.message).rpartition("planning again: ")[2]
    short = re.sub(r"([0-9a-f]{12})[0-9a-f]{20,}", r"\1…", why)
    return f"refused it, goes on serving {held}: {short}"


def _served(event: events.Served) -> str:
    several = f" ({event.num_versions} versions in one pass)" if event.num_versions > 1 else ""
    pointers = ", pointers kept" if event.kept_pointers else ""
    return f"serves version {event.version}{several}, in {seconds_text(event.apply_s)}{pointers}"
