"""`--key-file` of `gymfast delta`: frames for stores that are not trusted."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_commands import Gymfast

from gymfast.key_file import read_key_file

OLD, NEW = "old.safetensors", "new.safetensors"


@pytest.fixture
def signed(files: Path, gymfast: Gymfast) -> Path:
    """A frame that is authenticated with the key in `key`; another key is in `other`."""
    (files / "key").write_bytes(b"sesame, open now\n")
    (files / "other").write_bytes(b"sesame, open noW")
    result = gymfast("delta", "encode", OLD, NEW, "-o", "step.gfd", "--key-file", "key")
    assert result.code == 0, result
    return files / "step.gfd"


def test_a_frame_applies_and_verifies_with_its_key(signed: Path, gymfast: Gymfast) -> None:
    result = gymfast("delta", "verify", signed, "--key-file", "key", "--json")
    assert result.json["is_authentic"] is True
    assert "authentic" in gymfast("delta", "verify", signed, "--key-file", "key").out
    assert gymfast("delta", "verify", signed, "--json").json["is_authentic"] is None
    call = ("delta", "apply", OLD, signed, "--key-file", "key")
    assert gymfast(*call, "-o", "out.safetensors").code == 0
    assert Path("out.safetensors").read_bytes() == Path(NEW).read_bytes()
    assert gymfast(*call, "--in-place").code == 0
    assert Path(OLD).read_bytes() == Path(NEW).read_bytes()


@pytest.mark.parametrize(
    ("ending", "is_same"),
    [
        *((b"", True), (b"\n", True), (b"\r\n", True)),
        *((b"\n\n", False), (b"\r", False), (b"\r\r\n", False), (b" \n", False), (b"\n\r", False)),
    ],
)
def test_one_line_end_at_the_end_of_a_key_file_is_no_part_of_the_key(
    ending: bytes, is_same: bool, signed: Path, gymfast: Gymfast
) -> None:
    Path("written").write_bytes(b"sesame, open now" + ending)
    result = gymfast("delta", "verify", signed, "--key-file", "written")
    assert result.code == (0 if is_same else 3)


def test_a_key_of_any_bytes_can_be_written_with_a_line_end_behind_it(tmp_path: Path) -> None:
    keys = [b"16 bytes of a key" + end for end in (b"\n", b"\r\n", b"\r", b"\0", b" ", b"")]
    for key in keys:
        (tmp_path / "key").write_bytes(key + b"\n")
        expected = key[:-1] if key.endswith(b"\r") else key
        assert read_key_file(tmp_path / "key") == expected
        (tmp_path / "key").write_bytes(key + b"\r\n")
        assert read_key_file(tmp_path / "key") == key


def test_another_key_or_no_tag_is_exit_code_3_and_writes_nothing(
    signed: Path, gymfast: Gymfast
) -> None:
    assert gymfast("delta", "encode", OLD, NEW, "-o", "plain.gfd").code == 0
    before = Path(OLD).read_bytes()
    for frame, key in ((signed, "other"), (Path("plain.gfd"), "key")):
        for rest in (("-o", "out.safetensors"), ("--in-place",)):
            result = gymfast("delta", "apply", OLD, frame, "--key-file", key, *rest, "--json")
            assert result.code == 3
            assert result.json["error"]["number"] == 64
            assert frame.name in result.err
            assert "sesame" not in result.out + result.err
        assert gymfast("delta", "verify", frame, "--key-file", key).code == 3
    assert not Path("out.safetensors").exists()
    assert Path(OLD).read_bytes() == before


@pytest.mark.parametrize(
    "call",
    [
        ("encode", OLD, NEW, "-o", "new.gfd"),
        ("apply", OLD, "step.gfd", "-o", "out.safetensors"),
        ("verify", "step.gfd"),
    ],
    ids=lambda call: call[0],
)
def test_a_short_key_is_a_usage_error_that_does_not_show_it(
    call: tuple[str, ...], signed: Path, gymfast: Gymfast
) -> None:
    Path("short").write_bytes(b"sesame, open it")
    result = gymfast("delta", *call, "--key-file", "short")
    assert result.code == 2
    assert "15 bytes" in result.err
    assert "sesame" not in result.out + result.err
    assert not Path("new.gfd").exists()
    assert not Path("out.safetensors").exists()


def test_inspect_tells_that_a_frame_carries_a_tag(signed: Path, gymfast: Gymfast) -> None:
    assert gymfast("delta", "inspect", signed, "--json").json["authentication"] == "hmac-sha256"
    assert "hmac-sha256" in gymfast("delta", "inspect", signed).out
    shown = gymfast("delta", "inspect", signed, "--bytes").out
    assert "128 AUTH" in shown
    assert "without a meaning" not in shown
    assert gymfast("delta", "encode", OLD, NEW, "-o", "plain.gfd").code == 0
    assert gymfast("delta", "inspect", "plain.gfd", "--json").json["authentication"] is None
