"""Help: what it imports, and that it names only what exists (R73)."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cli_commands import walk_commands

from gymfast.cli import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]
SLOW = ("numpy", "torch", "rich", "msgspec", "safetensors", "gymfast._core", "gymfast.delta.apply")


ALL_COMMANDS = dict(walk_commands())


@pytest.mark.parametrize("call", [(), ("--version",), *ALL_COMMANDS], ids=" ".join)
def test_help_imports_nothing_slow(call: tuple[str, ...]) -> None:
    call = call if call == ("--version",) else (*call, "--help")
    code = (
        "import sys; from gymfast.cli import main\n"
        f"code = main({call!r})\n"
        f"found = [name for name in {SLOW!r} if name in sys.modules]\n"
        "sys.exit(f'imported: {found}' if found else code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_imports_no_other_command() -> None:
    code = (
        "import sys; from gymfast.cli import main; main(['env', '--help'])\n"
        "sys.exit(any(name.startswith(('gymfast.cli.delta', 'gymfast.cli.sync')) "
        "for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=" ".join)
def test_every_command_has_help_json_and_examples(path: tuple[str, ...]) -> None:
    command = ALL_COMMANDS[path]
    assert command.help
    assert command.epilog and "Examples:" in command.epilog
    if not isinstance(command, click.Group):
        assert "--json" in {name for p in command.params for name in p.opts}


@pytest.mark.parametrize("path", ALL_COMMANDS, ids=" ".join)
def test_every_example_parses(path: tuple[str, ...], tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("old", "new", "replica", "checkpoint", "result", "run/weight_v000007"):
        (tmp_path / name).mkdir(parents=True)
    weights = ("old.safetensors", "new.safetensors", "model.safetensors")
    for name in (*weights, "step.gfd", "relay.key", "starts.csv", "pool.jsonl", "run.toml"):
        (tmp_path / name).touch()
    epilog = ALL_COMMANDS[path].epilog or ""
    calls = re.findall(r"^  (?:[A-Z_]+=\S+ )?gymfast (.*)$", epilog, re.MULTILINE)
    assert calls
    for call in calls:
        words = call.partition(" > ")[0].split()
        command: click.Command = cli
        context = None
        while isinstance(command, click.Group):
            context = click.Context(command, context, **command.context_settings)
            found = command.get_command(context, words.pop(0))
            assert found is not None, call
            command = found
        command.make_context("gymfast", words, parent=context)


def option_hints(text: str) -> set[str]:
    """Long options that a text mentions."""
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", text))


def test_R73_every_option_in_help_or_message_exists() -> None:
    options = {name for c in ALL_COMMANDS.values() for p in c.params for name in p.opts}
    options |= {"--help", "--version"}
    texts = [*ROOT.glob("gymfast/**/*.py"), *ROOT.glob("csrc/**/*.[ch]*")]
    for source in texts:
        # One calls strace, the others name the options of frameworks.
        if source.name == "syscalls.py" or source.parent.name == "integrations":
            continue
        text = source.read_text()
        if source.suffix == ".py":
            nodes = ast.walk(ast.parse(text))
            strings = [n.value for n in nodes if isinstance(n, ast.Constant)]
            text = "\n".join(s for s in strings if isinstance(s, str))
        else:
            text = "\n".join(re.findall(r'"(?:[^"\\]|\\.)*"', text))
        assert option_hints(text) <= options, source


# Of pip, slime, SGLang and vLLM; docs/integrations is left to the frameworks.
FOREIGN = {
    "--api-key",
    "--api-server-count",
    "--data-parallel-size",
    "--config-settings",
    "--custom-megatron-init-path",
    "--custom-weight-loader",
    "--enable-lora",
    "--lora-target-modules",
    "--max-cpu-loras",
    "--max-loaded-loras",
    "--max-lora-rank",
    "--max-loras",
    "--max-loras-per-batch",
    "--middleware",
    "--tokenizer-worker-num",
    "--weight-transfer-config",
}


def test_R73_every_option_in_the_docs_exists() -> None:
    options = {name for c in ALL_COMMANDS.values() for p in c.params for name in p.opts}
    options |= FOREIGN | {"--help", "--version"}
    scripts = (
        "benchmarks/**/*.py",
        "tests/campaign/*.py",
        "tests/triton/*.py",
        "tests/conftest.py",
    )
    for source in (path for pattern in scripts for path in ROOT.glob(pattern)):
        options |= set(re.findall(r'"(--[a-z-]+)"', source.read_text()))
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        assert option_hints(page.read_text()) <= options, page


def test_R73_every_command_in_help_or_message_exists() -> None:
    for source in ROOT.glob("gymfast/**/*.py"):
        for group, name in re.findall(r"`gymfast ([a-z-]+) ([a-z]+)", source.read_text()):
            if group in COMMANDS and isinstance(ALL_COMMANDS[(group,)], click.Group):
                assert (group, name) in ALL_COMMANDS, source
