"""The timeline of the report: who had which version when, and what was done to them."""

from __future__ import annotations

from gymfast.demo.result import DemoResult, Mark
from gymfast.demo.svg import Drawing, Scale, vertical_ticks

WIDTH = 760.0
LEFT, RIGHT = 100.0, 740.0
LANE_HEIGHT = 64.0
TOP = 40.0
WORDS = {
    "publish": "published",
    "serve": "serves",
    "start": "started",
    "hold": "in the middle of applying",
    "kill": "killed (SIGKILL) while applying",
    "damage": "stored object damaged: version",
    "refuse": "refused damaged bytes; went on serving version",
    "repair": "object restored: version",
}


def timeline_chart(result: DemoResult) -> str:
    """One lane for each process; marks for versions, kill, damage, refusals and repair.

    The axis begins a moment before the first version: the warm-up before it has nothing to show.
    """
    lanes = ["trainer", *(receiver.name for receiver in result.receivers)]
    first = min(mark.at_s for mark in result.timeline if mark.what == "publish")
    marks = [mark for mark in result.timeline if mark.who in lanes and mark.at_s >= first]
    last = max(mark.at_s for mark in marks)
    bottom = TOP + LANE_HEIGHT * len(lanes)
    drawing = Drawing(WIDTH, bottom + 44, "Timeline of the trainer and the receivers")
    room = max(last - first, 1) * 0.03
    x = Scale(first - room, last + room, LEFT, RIGHT)
    _draw_incidents(drawing, result, x, bottom)
    for i, lane in enumerate(lanes):
        y = TOP + LANE_HEIGHT * (i + 0.5)
        drawing.text(LEFT - 12, y + 4, lane, "label", "end")
        drawing.line(LEFT, y, RIGHT, y, "axis")
        for mark in marks:
            if mark.who == lane:
                _draw_mark(drawing, mark, x(mark.at_s), y)
    vertical_ticks(drawing, x, [(tick, f"{tick:g} s") for tick in x.ticks(8)], bottom)
    drawing.text((LEFT + RIGHT) / 2, bottom + 38, "seconds since the start", "tick", "middle")
    return drawing.render()


def _draw_incidents(drawing: Drawing, result: DemoResult, x: Scale, bottom: float) -> None:
    """Shaded spans from harm to healing, each with a line of text above, on rows of their own."""
    for row, incident in enumerate(result.incidents):
        start, end = x(incident.at_s), x(incident.healed_at_s)
        healing_s = incident.healed_at_s - incident.at_s
        word = "killed" if incident.kind == "kill" else "object damaged"
        text = f"{word} at version {incident.version}, healed in {healing_s:.1f} s"
        y = 14.0 + 17 * row
        drawing.rect(start, y + 6, (max(end - start, 3), bottom - y - 6), "incident", text)
        is_left = start < (LEFT + RIGHT) / 2
        drawing.text(start if is_left else end, y, text, "legend", "start" if is_left else "end")


def _draw_mark(drawing: Drawing, mark: Mark, x: float, y: float) -> None:
    version = "" if mark.version is None else f" {mark.version}"
    title = f"{mark.at_s:.1f} s: {mark.who} {WORDS[mark.what]}{version}"
    if mark.what == "publish":
        drawing.rect(x - 3, y - 9, (6, 18), "bar full", title)
        drawing.text(x, y - 14, version.strip(), "small-text", "middle")
    elif mark.what == "serve":
        drawing.circle(x, y, 5, "dot small", title)
        drawing.text(x, y - 14, version.strip(), "small-text", "middle")
    elif mark.what == "start":
        drawing.path(f"M{x:.1f} {y + 8:.1f}l10 7l-10 7z", "start", title)
    elif mark.what == "kill":
        drawing.path(f"M{x - 7:.1f} {y - 7:.1f}l14 14m0 -14l-14 14", "cross", title)
    elif mark.what == "refuse":
        drawing.path(f"M{x:.1f} {y - 7:.1f}l7 7l-7 7l-7 -7z", "refuse", title)
    elif mark.what == "damage":
        drawing.path(f"M{x:.1f} {y + 8:.1f}l7 12h-14z", "bad", title)
    elif mark.what == "repair":
        drawing.path(f"M{x:.1f} {y + 20:.1f}l7 -12h-14z", "good", title)
