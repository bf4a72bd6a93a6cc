"""Invariants I80 and I02, read from the source text."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PYTHON = sorted([*(ROOT / "gymfast").rglob("*.py"), *(ROOT / "sim/gymfast_sim").rglob("*.py")])
CODEC_CPP = sorted(
    path
    for folder in ("csrc/format", "csrc/cpu")
    for path in (ROOT / folder).iterdir()
    if path.suffix in {".h", ".cpp"}
)
CODEC_PYTHON = sorted((ROOT / "gymfast/delta").rglob("*.py"))

BANNED_MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
}
BANNED_BUILTINS = {"eval", "exec", "compile", "__import__"}
BANNED_CALLS = {
    *("torch.load", "np.load", "numpy.load", "np.fromregex", "yaml.load", "yaml.unsafe_load"),
    *("os.system", "os.popen", "pandas.read_pickle"),
}
FLOAT_CAST = re.compile(
    r"\.astype\(\s*[\"']?(np\.|numpy\.)?(float|f[248]\b|half|double)"
    r"|\.(float|double|half|bfloat16)\(\)"
    r"|\.to\(\s*(dtype\s*=\s*)?torch\.(float|bfloat|half|double)"
    r"|\.view\(\s*[\"']?(np\.|numpy\.)?(float|half|double)"
)


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _breaks_i80(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            is_writing = [alias.name for alias in node.names] == ["dumps"]  # runs nothing
            names = [] if is_writing else [node.module or ""]
        else:
            names = []
        found += [name for name in names if name.partition(".")[0] in BANNED_MODULES]
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in BANNED_BUILTINS | BANNED_CALLS:
                found.append(f"line {node.lineno}: {called}")
            if any(k.arg in {"allow_pickle", "shell"} for k in node.keywords):
                found.append(f"line {node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("path", PYTHON, ids=_id)
def test_I80_nothing_that_runs_code_from_bytes(path: Path) -> None:
    assert _breaks_i80(ast.parse(path.read_text())) == []


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from marshal import loads", "torch.load(f)", "eval(s)", "np.load(f)"),
        "from pickle import dumps, loads",
    ],
)
def test_I80_scan_finds_what_it_looks_for(text: str) -> None:
    assert _breaks_i80(ast.parse(text))


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/|\"(\\.|[^\"\\])*\"", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("path", CODEC_CPP, ids=_id)
def test_I02_no_floating_point_type_in_the_codec(path: Path) -> None:
    found = re.findall(
        r"\b(?:float|double|_Float16|__bf16|__m\d+d?_?ps)\b", _without_comments(path.read_text())
    )
    assert found == []


@pytest.mark.parametrize("path", CODEC_PYTHON, ids=_id)
def test_I02_no_float_cast_in_the_python_codec(path: Path) -> None:
    assert [m.group() for m in FLOAT_CAST.finditer(path.read_text())] == []


@pytest.mark.parametrize("text", ["x.astype(np.float32)", "t.float()", "t.to(torch.bfloat16)"])
def test_I02_scan_finds_what_it_looks_for(text: str) -> None:
    assert FLOAT_CAST.search(text)
