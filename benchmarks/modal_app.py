"""The transfer benchmarks on one machine of Modal with GPUs, by one command.

python -m benchmarks.modal_app --gpu H100:8 --csv transfer.csv

Versions end to end are left out, as they need a link that is shaped to 1 Gb/s. Builds nccl-tests
and gymfast in the image. Needs the package modal and an account. Never run on Modal so far: the
tests look at the graph of objects only.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

NAME = "gymfast-transfer"
NCCL_TESTS = "/opt/nccl-tests"
_ROOT = Path(__file__).parents[1]
_CUDA = "nvidia/cuda:13.0.2-devel-ubuntu24.04"
_LEFT_OUT = [".git", "build", "**/*.so", "**/__pycache__"]


def build(gpu: str, timeout_s: int = 3600) -> tuple[Any, Any]:
    """The app and its one function; nothing is started, no account is needed."""
    import modal

    # A serialized function needs the interpreter that serialized it.
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    image = (
        modal.Image.from_registry(_CUDA, add_python=python)
        .apt_install("git", "build-essential", "iperf3", "iproute2", "procps", "libnccl-dev")
        .run_commands(
            f"git clone --depth 1 https://github.com/NVIDIA/nccl-tests {NCCL_TESTS}",
            f"make -C {NCCL_TESTS} -j",
        )
        .add_local_dir(str(_ROOT), "/opt/gymfast", copy=True, ignore=_LEFT_OUT)
        .pip_install("torch", "pytest")
        .run_commands("pip install '/opt/gymfast[bench]'")
        .env({"GYMFAST_NCCL_TESTS": f"{NCCL_TESTS}/build"})
    )
    app = modal.App(NAME)
    # Serialized, as it is no function of a module that the container could import.
    function = app.function(
        image=image, gpu=gpu, timeout=timeout_s, serialized=True, name="transfer"
    )(transfer)
    return app, function


def transfer() -> tuple[str, str]:
    """Runs in the container: the tables and the CSV."""
    import pathlib
    import subprocess as processes
    import sys as system

    command = [system.executable, "-m", "benchmarks", "transfer", "--csv", "/tmp/transfer.csv"]
    command += ["--cases", "loopback,lists,shaped,chain,nccl"]
    done = processes.run(command, cwd="/opt/gymfast", capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return done.stdout, pathlib.Path("/tmp/transfer.csv").read_text()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.modal_app", description=__doc__)
    parser.add_argument("--gpu", default="H100:8", help="as Modal names it, with a count")
    parser.add_argument("--csv", type=Path)
    options = parser.parse_args(arguments)
    app, function = build(options.gpu)
    with app.run():
        tables, csv = function.remote()
    if options.csv:
        options.csv.write_text(csv)
    print(tables)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
