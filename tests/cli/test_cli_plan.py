"""`gymfast plan`: what it prints, and what it refuses."""

from __future__ import annotations

import io
import json
import textwrap
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from cli_commands import Gymfast

from gymfast.cost.plan import plan, sync_job

CLUSTERS = ("--train", "4x8:B200", "--engines", "2x8:B200")


def test_the_number_of_nics_and_the_time_of_each_stage_are_printed(gymfast: Gymfast) -> None:
    lines = gymfast("plan", "GLM-4.7", *CLUSTERS).out.splitlines()
    assert lines[0] == "GLM-4.7 bf16, 717 GB: 4x8 B200 to 2x8 B200 over rdma"
    assert lines[1].startswith("NICs: 8 of a node, 400 Gb/s each; roots: 8")
    assert [line.split()[0] for line in lines[7:11]] == ["pack", "wire", "join", "unpack"]
    assert "line rate 1.7917 s" in lines[-1]


def test_json_has_the_same_numbers(gymfast: Gymfast) -> None:
    fields = json.loads(gymfast("plan", "qwen3-8b", *CLUSTERS, "--net", "tcp", "--json").out)
    assert (fields["schema"], fields["model"]) == ("gymfast.plan/1", "Qwen3-8B")
    assert fields["num_bytes"] == 16_381_470_720
    assert fields["line_rate_s"] == pytest.approx(2.621, abs=1e-3)
    assert set(fields["stages_s"]) == {"pack", "wire", "join", "unpack"}


def test_an_adapter_and_a_delta_are_smaller(gymfast: Gymfast) -> None:
    def planned(*options: str) -> int:
        return json.loads(gymfast("plan", "GLM-4.7", *CLUSTERS, "--json", *options).out)[
            "num_bytes"
        ]

    assert planned("--lora", "32") == 4_740_612_096
    assert planned("--saved", "0.98") == round(planned() * (1 - 0.98))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("GPT-5", *CLUSTERS), "not in the catalogue, expected one of Qwen3-0.6B"),
        (("GLM-4.7", "--train", "4x8", "--engines", "2x8:B200"), "'4x8' is no cluster"),
        (("GLM-4.7", *CLUSTERS, "--saved", "1"), "saved is 1.0"),
        (("GLM-4.7", *CLUSTERS, "--lora", "0"), "rank is 0"),
        (("GLM-4.7", *CLUSTERS, "--depth", "0"), "depth is 0"),
        (("GLM-4.7", *CLUSTERS, "--bucket-mib", "0"), "bucket_bytes is 0"),
        (("GLM-4.7", *CLUSTERS, "--nodes-per-engine", "3"), "do not make up 2x8 B200"),
        (("Qwen3-8B", *CLUSTERS, "--format", "int4"), "Qwen3-8B has none: use bf16 or fp8"),
    ],
)
def test_a_plan_that_cannot_be_is_a_usage_error(
    gymfast: Gymfast, options: tuple[str, ...], words: str
) -> None:
    result = gymfast("plan", *options)
    assert result.code == 2
    assert words in " ".join(result.err.split())


@pytest.mark.parametrize("saved", [None, 0.98])
@pytest.mark.parametrize("net", ["rdma", "tcp", "wan"])
def test_the_simulator_gets_the_numbers_of_the_command(
    gymfast: Gymfast, net: str, saved: float | None
) -> None:
    options = ("--saved", str(saved)) if saved is not None else ()
    printed = json.loads(
        gymfast("plan", "GLM-4.7", *CLUSTERS, "--net", net, "--json", *options).out
    )
    made = plan(sync_job("GLM-4.7", "4x8:B200", "2x8:B200", net, saved_ratio=saved))
    assert printed["total_s"] == made.total_s
    assert printed["stages_s"] == made.busy_s
    assert printed["pause_s"] == made.pause_s
    assert printed["num_bytes"] == made.job.num_bytes


def test_the_example_of_the_docs_prints_what_it_says() -> None:
    text = (Path(__file__).parents[2] / "docs" / "transfer.md").read_text()
    code = text.split("gives a simulator the same numbers:\n")[1].split("\n\nSeconds")[0]
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(textwrap.dedent(code), {})
    stated = [line.split("# ")[1] for line in code.splitlines() if "# " in line]
    assert printed.getvalue().splitlines() == stated
