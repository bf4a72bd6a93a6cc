"""The text of the command line: help of every command, and what people see when things go wrong.

`UPDATE_GOLDEN=1 pytest tests/cli/test_cli_golden.py` writes the files anew; then read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from cli_commands import Gymfast, walk_commands
from safetensors.numpy import load_file, save_file

GOLDEN = Path(__file__).parent / "golden"
PATHS = [path for path, _ in walk_commands()]


def compare(name: str, text: str, width: int = 80) -> None:
    """Assert that a text is the stored one, or store it."""
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.write_text(text)
    assert text == file.read_text(), f"{file} differs: see the first lines of this file"
    assert max(map(len, text.splitlines())) <= width


@pytest.mark.parametrize("path", PATHS, ids=" ".join)
def test_the_help_of_a_command_is_the_stored_text(path: tuple[str, ...], gymfast: Gymfast) -> None:
    compare("_".join(["help", *path]), gymfast(*path, "--help").out)


def test_every_stored_text_is_compared() -> None:
    stored = {file.stem for file in GOLDEN.glob("*.txt")}
    helps = {"_".join(["help", *path]) for path in PATHS}
    assert stored == helps | {f"error_{name}" for name in ERRORS}


ERRORS = {
    "usage": ["delta", "encode", "old", "-o", "f.gfd"],
    "no_such_command": ["delta", "decode"],
    "no_such_file": ["delta", "inspect", "nothing.gfd"],
    "wrong_base": ["delta", "apply", "wrong.safetensors", "step.gfd", "-o", "out.safetensors"],
    "wrong_dtype": ["delta", "apply", "dtype.safetensors", "step.gfd", "-o", "out.safetensors"],
    "missing_tensor": ["delta", "apply", "missing.safetensors", "step.gfd", "-o", "o.safetensors"],
    "truncated": ["delta", "verify", "cut.gfd"],
    "flipped": ["delta", "inspect", "flipped.gfd"],
    "no_frame": ["delta", "apply", "old", "old.safetensors", "-o", "out"],
    "pickle": ["delta", "encode", "model.bin", "new", "-o", "f.gfd"],
    "no_checkpoint": ["delta", "apply", "empty", "step.gfd", "-o", "out"],
    "output_exists": ["delta", "encode", "old", "new", "-o", "step.gfd"],
    "output_is_input": ["delta", "apply", "old", "step.gfd", "-o", "old"],
    "no_output": ["delta", "apply", "old", "step.gfd"],
    "json": ["delta", "inspect", "cut.gfd", "--json"],
}


@pytest.fixture
def bad_files(frame: Path) -> None:
    """Files for ERRORS beside those of `frame`."""
    content = frame.read_bytes()
    Path("cut.gfd").write_bytes(content[:300])
    Path("flipped.gfd").write_bytes(content[:300] + bytes([content[300] ^ 1]) + content[301:])
    Path("model.bin").write_bytes(b"PK\x03\x04")
    Path("empty").mkdir()
    Path("empty/pytorch_model.bin").write_bytes(b"PK\x03\x04")
    weights = load_file("old.safetensors")
    save_file(
        weights | {"embed.weight": weights["embed.weight"].view(np.int16)}, "dtype.safetensors"
    )
    scale = weights["layers.0.up.weight"].copy()
    scale[3, 3] = 7
    save_file(weights | {"layers.0.up.weight": scale}, "wrong.safetensors")
    save_file({n: w for n, w in weights.items() if n != "embed.weight"}, "missing.safetensors")


@pytest.mark.usefixtures("bad_files")
@pytest.mark.parametrize("name", ERRORS)
def test_what_people_see_when_it_goes_wrong_is_the_stored_text(name: str, gymfast: Gymfast) -> None:
    result = gymfast(*ERRORS[name])
    assert result.code != 0
    shown = f"$ gymfast {' '.join(ERRORS[name])}\n{result.out}{result.err}exit code {result.code}\n"
    compare(f"error_{name}", shown, width=1000)
