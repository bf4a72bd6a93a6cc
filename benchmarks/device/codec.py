"""The codec on a GPU: equality with the CPU and speed beside a device copy, in one short run.

Usage: `bash benchmarks/device/codec.sh`, or `python -m benchmarks.device.codec` where gymfast
with gymfast._cuda is installed. With `--module` another module with its functions, whose device
memory is that of the host, takes its place; times then say nothing.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.device.deadline import Deadline
from benchmarks.device.facts import NO_GPU, facts

FAILED, USAGE, NO_TIME = 1, 2, 4  # exit status
_GPU_ELEMENTS, _HOST_ELEMENTS = 1_200_000_000, 200_000
_GPU_STATE_ELEMENTS = 1 << 31  # 4 GiB of BF16


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    started = Deadline(options.budget_s)
    try:
        module = load_module(options.module)
    except ImportError as error:
        print(f"no module {options.module!r} here ({error}): this never ran", file=sys.stderr)
        return NO_GPU
    if not module.device_count():
        print("no GPU here (the CUDA driver reports none): this never ran", file=sys.stderr)
        return NO_GPU
    try:
        import torch
    except ImportError:
        print("no torch here, which holds the tensors: this never ran", file=sys.stderr)
        return NO_GPU
    is_host = module.__name__ != "gymfast._cuda"
    if not is_host and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU: this never ran", file=sys.stderr)
        return NO_GPU
    return _run(options, module, started, is_host=is_host)


def load_module(name: str) -> ModuleType:
    """gymfast._cuda for "cuda"; otherwise an extension module by its path, or a module by name.

    Raises ImportError if there is none.
    """
    if name == "cuda":
        return importlib.import_module("gymfast._cuda")
    if not name.endswith(".so"):
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(Path(name).name.split(".")[0], name)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is no extension module")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(
    options: argparse.Namespace, module: ModuleType, deadline: Deadline, *, is_host: bool
) -> int:
    from benchmarks.device.memory import Device
    from benchmarks.device.native import NativeCodec
    from benchmarks.device.phases import PHASES, Options, Session, run_phases
    from benchmarks.device.results import Report
    from benchmarks.device.speed import Settings

    if unknown := set(options.phases) - set(PHASES):
        print(f"no phase {', '.join(unknown)}: there are {', '.join(PHASES)}", file=sys.stderr)
        return USAGE
    elements = options.elements or (_HOST_ELEMENTS if is_host else _GPU_ELEMENTS)
    state = options.state_elements or (elements if is_host else _GPU_STATE_ELEMENTS)
    report = Report(_environment(module))
    asked = Options(
        module=options.module,
        num_elements=elements,
        large_units=state + state // 16,  # over 4 GiB where the state has them
        part_units=options.part_elements,
        num_flips=options.flips,
        densities=options.densities,
        backends=options.backends or (("cpu",) if is_host else ("cuda", "triton")),
    )
    settings = Settings(state, options.call_sections, options.rounds, options.seed)
    session = Session(asked, settings, NativeCodec(module, Device(is_host=is_host)), report)
    options.out.mkdir(parents=True, exist_ok=True)
    run_phases(session, options.phases or tuple(PHASES), deadline, options.out)
    for target in report.targets():
        word = "met" if target.is_met else "MISSED"
        print(f"{word}: {target.what} {target.wanted}, measured {target.measured:.2f}")
    states = {phase.state for phase in report.phases}
    if states & {"different", "failed"}:
        return FAILED
    return NO_TIME if "cut" in states else 0


def _environment(module: ModuleType) -> dict[str, str]:
    import torch

    from benchmarks.environment import environment

    found = environment() | facts()
    found["torch_cuda"] = str(torch.version.cuda)
    found["module"] = f"{module.__name__} at {module.__file__}"
    found["command"] = f"python -m benchmarks.device.codec {' '.join(sys.argv[1:])}"
    if commit := os.environ.get("GYMFAST_COMMIT"):  # where the sources came without their history
        found["commit"] = commit
    for name, value in found.items():
        print(f"{name}: {value}", flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device.codec", description=__doc__)
    parser.add_argument(
        "--module", default="cuda", help='"cuda", a path that ends with .so, a name'
    )
    parser.add_argument("--elements", type=int, help="to compare with the CPU")
    parser.add_argument("--state-elements", type=int, help="BF16 elements to time")
    parser.add_argument("--part-elements", type=int, default=1 << 28, help="for slow rows")
    parser.add_argument("--call-sections", type=int, default=64, help="of one native call")
    parser.add_argument("--densities", type=_percentages, default=(0.01, 0.03, 0.001, 0.1))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--flips", type=int, default=8, help="damaged bytes per case and profile")
    parser.add_argument("--backends", type=_words, metavar="NAME,...", default=())
    parser.add_argument("--phases", type=_words, metavar="NAME,...", default=())
    parser.add_argument("--budget-s", type=float, default=330.0)
    parser.add_argument("--seed", type=int, default=1)
    out = Path(os.environ.get("OUT") or "build/device")
    parser.add_argument("--out", type=Path, default=out, help="folder for codec.csv, codec.json")
    return parser


def _percentages(text: str) -> tuple[float, ...]:
    return tuple(float(part) / 100 for part in text.split(","))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
