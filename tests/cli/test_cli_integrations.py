"""`gymfast integrations`: what the list and the check print, and what they cost."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from cli_commands import Gymfast

from gymfast.integrations.catalogue import INTEGRATIONS

HEAVY = ("numpy", "torch", "vllm", "sglang", "slime", "ray", "trl", "verl")


@pytest.fixture
def fake_slime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The project of that name on the package index, which has nothing to do with slime."""
    (tmp_path / "slime").mkdir()
    (tmp_path / "slime" / "__init__.py").write_text("raise RuntimeError('imported')")
    info = tmp_path / "slime-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slime\nVersion: 0.0.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_list_has_a_line_for_each_framework(fake_slime: Path, gymfast: Gymfast) -> None:
    lines = gymfast("integrations").out.splitlines()
    assert lines[0].split() == ["framework", "version", "status", "switch"]
    listed = lines[1 : len(INTEGRATIONS) + 1]
    for integration, line in zip(INTEGRATIONS, listed, strict=True):
        assert line.startswith(integration.name) and line.endswith(integration.switch[0])
    assert "0.0.0  other package" in lines[1]
    assert "slime: " in lines[-1] and "is another package of the name 'slime'" in lines[-1]


def test_the_list_as_json(fake_slime: Path, gymfast: Gymfast) -> None:
    found = gymfast("integrations", "--json").json
    assert found["schema"] == "gymfast.integrations/1"
    rows = {row["package"]: row for row in found["integrations"]}
    assert set(rows) == {integration.package for integration in INTEGRATIONS}
    slime = rows["slime"]
    assert (slime["name"], slime["version"], slime["status"]) == ("slime", "0.0.0", "other package")
    assert slime["known"] == "0.3.1" and slime["page"] == "docs/integrations/slime.md"
    assert slime["switch"][0].endswith("gymfast.integrations.slime.install")


def test_the_list_takes_less_than_a_second_and_imports_no_framework() -> None:
    code = (
        "import sys; from gymfast.cli import main\n"
        "code = main(['integrations'])\n"
        f"found = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "sys.exit(f'imported: {found}' if found else code)"
    )
    took_s = min(_time_of(code) for _ in range(3))  # others may keep the machine busy
    assert took_s < 1.0


def _time_of(code: str) -> float:
    start_s = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return time.monotonic() - start_s


def test_a_check_that_fails_has_an_exit_code_and_says_why(
    fake_slime: Path, gymfast: Gymfast
) -> None:
    result = gymfast("integrations", "SLIME")
    assert result.code == 1 and result.out == ""
    assert "is another package of the name 'slime'" in result.err
    result = gymfast("integrations", "slime", "--json")
    assert result.json["error"]["kind"] == "GymfastError"


def test_a_check_that_succeeds_prints_all_flags(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gymfast: Gymfast
) -> None:
    (tmp_path / "slime" / "backends" / "megatron_utils").mkdir(parents=True)
    for file in ("__init__.py", "backends/megatron_utils/actor.py"):
        (tmp_path / "slime" / file).touch()
    (tmp_path / "setup.py").write_text('setup(name="slime", version="0.3.1")')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("gymfast.integrations.slime.require_class", lambda *_: object)
    result = gymfast("integrations", "slime")
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == "slime 0.3.1: ready, its signatures are the known ones"
    assert "docs/integrations/slime.md" in lines[1]
    flags = [line.split()[0] for line in lines[2:]]
    assert flags[0] == "--custom-megatron-init-path" and len(flags) == 5


def test_an_unknown_name_is_a_usage_error(gymfast: Gymfast) -> None:
    result = gymfast("integrations", "megatron")
    assert result.code == 2
    assert "'megatron' is none of: slime, miles, sglang, vllm, verl" in result.err
