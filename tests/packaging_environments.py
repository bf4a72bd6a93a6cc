"""Fresh virtual environments and builds for the packaging tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds only what the test installs."""

    folder: Path

    @classmethod
    def create(cls, folder: Path) -> Environment:
        venv.create(folder, with_pip=True)
        return cls(folder)

    def run(self, *command: str | Path) -> str:
        """The output of a program of this environment, started outside the checkout."""
        program, *arguments = map(str, command)
        done = subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=self.folder,
            env={k: v for k, v in os.environ.items() if not k.startswith("PYTHON")},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def install(self, *what: str | Path) -> None:
        self.run("python", "-m", "pip", "install", "-q", "--disable-pip-version-check", *what)

    def distributions(self) -> set[str]:
        listed = self.run("python", "-m", "pip", "list", "--format=freeze")
        return {line.partition("==")[0].lower() for line in listed.splitlines()}


def clean_copy(folder: Path) -> Path:
    """The tracked files of the checkout as they are now, without build outputs."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target)
    return folder


def build(source: Path, out: Path, *kinds: str) -> None:
    """Writes a wheel or sdist of `source` to `out`, without build isolation."""
    command = [sys.executable, "-P", "-m", "build", "--no-isolation", "-o", out, *kinds, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
