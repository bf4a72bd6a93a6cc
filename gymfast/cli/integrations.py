"""`gymfast integrations`: the frameworks that are here, and whether gymfast fits them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from gymfast.cli.output import Output, format_table, with_output

if TYPE_CHECKING:
    from gymfast.integrations.catalogue import Finding

_EPILOG = """\b
Examples:
  gymfast integrations
  gymfast integrations vllm
  gymfast integrations --json
"""


@click.command("integrations", epilog=_EPILOG)
@click.argument("name", required=False)
@with_output
def command(output: Output, name: str | None) -> None:
    """List the frameworks that gymfast plugs into, or check the one called NAME.

    The list imports none of them: `ready` says that the version is one of
    those that were read, and that the framework would find the plug-in.

    With NAME the framework is imported, its signatures are compared with those
    that gymfast uses, and the exact flags are printed. The exit code is not 0
    if gymfast would not work with it.
    """
    if name is None:
        _list(output)
    else:
        _check(output, name)


def _list(output: Output) -> None:
    from gymfast.integrations.catalogue import INTEGRATIONS, find

    findings = [find(integration) for integration in INTEGRATIONS]
    rows = [
        (found.integration.name, found.version or "-", found.status, found.integration.switch[0])
        for found in findings
    ]
    details = [f"{found.integration.name}: {found.detail}" for found in findings if found.detail]
    text = [
        *format_table(("framework", "version", "status", "switch"), rows),
        *(["", *details] if details else []),
    ]
    output.result({"integrations": [_fields(found) for found in findings]}, text)


def _check(output: Output, name: str) -> None:
    from gymfast.integrations.catalogue import INTEGRATIONS, check

    names = {key: i for i in INTEGRATIONS for key in (i.package, i.name.lower())}
    integration = names.get(name.lower())
    if integration is None:
        known = ", ".join(i.package for i in INTEGRATIONS)
        raise click.BadParameter(f"{name!r} is none of: {known}", param_hint="NAME")
    found = check(integration)
    text = [
        f"{integration.name} {found.version}: {found.status}, its signatures are the known ones",
        f"gymfast knows {integration.known}; see {integration.page}",
        *(f"  {line}" for line in integration.switch),
    ]
    output.result(_fields(found), text)


def _fields(found: Finding) -> dict[str, object]:
    integration = found.integration
    return {
        "name": integration.name,
        "package": integration.package,
        "version": found.version or None,
        "known": integration.known,
        "status": found.status,
        "detail": found.detail,
        "switch": list(integration.switch),
        "page": integration.page,
    }
