"""What `import gymfast` loads, seen in a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {
    *("torch", "triton", "modal", "simpy", "ray", "scipy", "cupy", "jax", "pandas", "pydantic"),
    *("transformers", "vllm", "sglang", "verl", "slime", "obstore", "gymfast_sim"),
}
DEPENDENCIES = {"numpy", "msgspec", "safetensors", "click", "rich"}
# What the five bring with them; msgspec uses typing_extensions where it is installed.
INDIRECT = {"markdown_it", "mdurl", "pygments", "typing_extensions"}


def _loaded_by(statement: str) -> set[str]:
    """Top-level packages outside the standard library that the statement loads."""
    program = (
        "import sys; before = set(sys.modules)\n"
        f"{statement}\n"
        "import json; names = {m.partition('.')[0] for m in set(sys.modules) - before}\n"
        "print(json.dumps(sorted(n for n in names if n not in sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True
    )
    return {name for name in json.loads(done.stdout) if not name.startswith("_")}


def test_import_gymfast_loads_numpy_at_most() -> None:
    assert _loaded_by("import gymfast") <= {"gymfast", "numpy"}


@pytest.mark.parametrize(
    "module", ["gymfast.delta", "gymfast.stores", "gymfast.sync", "gymfast.cli", "gymfast.testing"]
)
def test_no_part_loads_a_framework(module: str) -> None:
    loaded = _loaded_by(f"import {module}")
    assert not loaded & HEAVY
    assert loaded <= {"gymfast"} | DEPENDENCIES | INDIRECT


def test_every_public_name_loads_without_a_framework() -> None:
    loaded = _loaded_by("import gymfast\nfor name in gymfast.__all__: getattr(gymfast, name)")
    assert not loaded & HEAVY


def test_the_simulator_loads_without_simpy() -> None:
    assert _loaded_by("import gymfast_sim") <= {"gymfast_sim", "gymfast", "numpy"}
