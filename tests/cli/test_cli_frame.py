"""The frame of the command line: exit codes, streams, JSON, environment variables."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

import gymfast.cli.border
import gymfast.cli.env
from gymfast import __version__, _core, errors
from gymfast.cli import EXIT_CODES, main
from gymfast.cli.output import Output, format_size, format_table, with_output
from gymfast.cli.settings import SETTINGS

ROOT = Path(__file__).resolve().parents[2]


def run_raising(error: BaseException, *words: str) -> int:
    """Exit code of a command that raises `error`."""

    @click.command("work")
    @with_output
    def work(output: Output) -> None:
        raise error

    return gymfast.cli.border.run(click.Group("gymfast", {"work": work}), ["work", *words])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.GymfastError("x"), 1),
        (errors.FormatError("x", 22), 3),
        (errors.ChecksumError("x", 58), 3),
        (errors.CoverageError("x", 62), 3),
        (errors.ChainError("x"), 3),
        (errors.DeadlineError("x"), 4),
        (errors.NotFoundError("x"), 5),
        (errors.ConflictError("x"), 6),
        (errors.BudgetError("x"), 7),
        (errors.StoreError("x"), 1),
        (ValueError("x"), 1),
        (TypeError("x"), 1),
        (OSError(28, "No space left on device", "file"), 1),
        (MemoryError("x"), 7),
        (KeyError("x"), 1),
        (EOFError("x"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_an_error_is_one_message_and_its_exit_code(
    error: BaseException, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_raising(error) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.strip().startswith("Error: ")
    assert len(err.strip().splitlines()) == 1


def test_an_error_with_json_is_an_object_on_stdout_and_a_message_on_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert run_raising(errors.FormatError("broken", 22), "--json") == 3
    out, err = capfd.readouterr()
    error = {"kind": "FormatError", "message": "broken", "exit_code": 3, "number": 22}
    assert json.loads(out) == {"schema": "gymfast.work/1", "error": error}
    assert err == "Error: broken\n"


def test_a_wrong_option_is_a_usage_error_also_with_json(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["env", "--colour", "--json"]) == 2
    out, err = capfd.readouterr()
    assert json.loads(out)["schema"] == "gymfast.env/1"
    assert json.loads(out)["error"]["kind"] == "UsageError"
    assert "--colour" in err


def test_a_mistyped_option_is_told_with_the_nearest_one(gymfast) -> None:
    result = gymfast("delta", "inspect", "--byte")
    assert result.code == 2
    assert "--bytes" in result.err


def test_a_group_without_a_command_shows_its_help_on_stderr(
    capfd: pytest.CaptureFixture[str],
) -> None:
    main(["delta"])
    out, err = capfd.readouterr()
    assert "Commands:" in out + err


def test_a_bug_is_a_message_and_the_traceback_only_on_request(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_raising(ZeroDivisionError("x")) == 1
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert "GYMFAST_TRACEBACK=1" in err
    monkeypatch.setenv("GYMFAST_TRACEBACK", "1")
    assert run_raising(ZeroDivisionError("x")) == 1
    assert "Traceback" in capfd.readouterr().err


def test_the_exit_codes_of_all_errors_are_documented() -> None:
    documented = {code for code, _ in EXIT_CODES}
    classes = [c for c in vars(errors).values() if isinstance(c, type)]
    assert {c.exit_code for c in classes if issubclass(c, errors.GymfastError)} <= documented
    text = (ROOT / "docs" / "cli.md").read_text()
    assert all(f"| {code} |" in text for code in documented)


def test_version(gymfast) -> None:
    assert gymfast("--version").out == f"gymfast {__version__}\n"


@pytest.mark.parametrize("args", [["env"], ["env", "--json"], ["--help"]])
def test_a_reader_that_goes_away_is_no_error(args: list[str], gymfast_process) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    result = gymfast_process(*args, capture_output=False, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (result.code, result.err) == (0, "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_behind_stdout_is_one_message(gymfast_process, unbuffered) -> None:
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    for args in (["env"], ["env", "--json"], ["--help"]):
        with Path("/dev/full").open("w") as full:
            result = gymfast_process(
                *args,
                env=environment,
                capture_output=False,
                stdout=full,
                stderr=subprocess.PIPE,
            )
        assert result.code == 1
        assert result.err.startswith("Error: ")
        assert result.err.endswith("No space left on device\n")
        assert len(result.err.splitlines()) == 1


def test_env_names_value_and_origin_of_every_variable(gymfast, monkeypatch) -> None:
    monkeypatch.setenv("GYMFAST_THREADS", "3")
    rows = {row["name"]: row for row in gymfast("env", "--json").json["settings"]}
    assert set(rows) == {setting.name for setting in SETTINGS}
    assert (rows["GYMFAST_THREADS"]["value"], rows["GYMFAST_THREADS"]["origin"]) == (
        "3",
        "environment",
    )
    assert rows["GYMFAST_CPU"]["origin"] == "default"


def test_env_lists_every_back_end_and_what_a_missing_one_needs(gymfast, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "gymfast.delta.backends.triton", None)
    lines = gymfast("env").out.splitlines()
    assert lines[0].split() == ["back", "end", "works", "detail"]
    assert [line.split()[:2] for line in lines[1:3]] == [["cpu", "yes"], ["reference", "yes"]]
    found = {row["name"]: row for row in gymfast("env", "--json").json["backends"]}
    assert set(found) == {"cpu", "reference", "cuda", "triton"}
    assert found["cpu"]["is_available"]
    assert found["cpu"]["detail"].split()[-1] in _core.cpu_targets()
    assert not found["triton"]["is_available"]
    assert "gymfast[triton]" in found["triton"]["detail"]
    assert found["cuda"]["detail"].startswith(
        "CUDA kernels" if found["cuda"]["is_available"] else "backend='cuda' needs"
    )


def test_env_says_what_a_wrong_instruction_set_should_be(gymfast_process) -> None:
    environment = os.environ | {"GYMFAST_CPU": "AVX2"}
    result = gymfast_process("env", env=environment)
    assert result.code == 0
    assert f"GYMFAST_CPU is 'AVX2', expected one of {', '.join(_core.cpu_targets())}" in result.out


def test_an_unknown_variable_warns_with_the_nearest_name(gymfast, monkeypatch) -> None:
    monkeypatch.setenv("GYMFAST_THREAD", "3")
    result = gymfast("env", "--json")
    assert result.json["unknown"] == ["GYMFAST_THREAD"]
    assert "did you mean GYMFAST_THREADS?" in result.err


def test_every_variable_in_the_source_is_in_the_table() -> None:
    files = [*ROOT.glob("gymfast/**/*.py"), *ROOT.glob("csrc/**/*.[ch]*")]
    found = {n for f in files for n in re.findall(r"\bGYMFAST_[A-Z_]*[A-Z]\b", f.read_text())}
    in_code = {name for name in found if not name.endswith(("_H", "_H_"))}
    assert {s.name for s in SETTINGS} <= in_code
    readers = {
        name
        for f in files
        for name in re.findall(r"(?:environ\W+|getenv\W+|envvar=\W*)(GYMFAST_\w+)", f.read_text())
    }
    assert readers <= {s.name for s in SETTINGS}


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (123_456, "123 kB"), (1_234_567_890, "1.23 GB")],
)
def test_sizes_are_powers_of_1000(size: int, text: str) -> None:
    assert format_size(size) == text


def test_tables_are_aligned() -> None:
    assert format_table(("name", "n"), [("a", "5"), ("bcdef", "10")]) == [
        "name    n",
        "a       5",
        "bcdef  10",
    ]


def test_progress_without_a_terminal_is_a_plain_line_now_and_then(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([0.0, 1.0, 11.0, 12.0])
    monkeypatch.setattr("gymfast.cli.output.time.monotonic", lambda: next(times))
    with Output("x", is_json=False, has_progress=True).progress("encode") as advance:
        for done in (1, 2000, 3000):
            advance(done, 4000)
    assert capfd.readouterr().err == "encode: 2 kB of 4 kB\n"


def test_no_progress_is_silent_and_imports_no_rich(gymfast_process) -> None:
    code = (
        "import sys; from gymfast.cli.output import Output\n"
        "with Output('x', is_json=False, has_progress=False).progress('p') as advance:\n"
        "    advance(1, 2)\n"
        "assert 'rich' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
