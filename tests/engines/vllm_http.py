"""A real vLLM server that a trainer updates over HTTP: `make test-engines`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from engines.vllm_process import PROMPTS
from engines.vllm_run import Run
from engines.vllm_server import Server
from transformers import Qwen3Config

from gymfast.errors import ChainError, ChannelError
from gymfast.integrations.update_request import InitRequest
from gymfast.integrations.vllm_client import VLLMClient

NUM_VERSIONS = 8
CACHED = list(range(100, 196))
ALL_PROMPTS = [*PROMPTS, CACHED]
Tokens = list[list[int]]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Versions that differ in all tensors, but for one that changes a tensor of a fused layer.

    The trainer was restarted before version 6.
    """
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    run = Run(tmp_path_factory.mktemp("http"), config)
    for version in range(1, NUM_VERSIONS):
        few = ["model.layers.1.self_attn.q_proj.weight"]
        if version == 6:
            run.restart()
        run.publish(few if version == 2 else list(run.weights))
    return run


@pytest.fixture(scope="module")
def follow(run: Run) -> InitRequest:
    return InitRequest(**run.follows)


@pytest.fixture
def expected(run: Run) -> list[Tokens]:
    """What an engine makes of the prompts that loads each checkpoint, the last one as it starts."""
    last = NUM_VERSIONS - 1
    steps = [["look"], *(["reload", run.checkpoint(v)] for v in range(last))]
    first, *others = run.engine("reference", last, steps, prompts=ALL_PROMPTS)
    return [found["tokens"] for found in [*others, first]]


def refusal(client: VLLMClient, follow: InitRequest, version: int) -> str:
    with pytest.raises(ChainError) as caught:
        client.pull(follow, version)
    return str(caught.value)


def test_a_server_follows_a_run_over_http(
    run: Run, follow: InitRequest, expected: list[Tokens]
) -> None:
    with Server(run.checkpoint(0), run.folder / "server.log") as server:
        client = VLLMClient(server.url)
        assert server.tokens(ALL_PROMPTS) == expected[0]
        for version in (1, 2, 3):
            before = server.num_cached
            assert server.tokens([CACHED]) == expected[version - 1][-1:]
            assert server.num_cached > before, "the prompt is in the prefix cache"
            client.pull(follow, version)
            before = server.num_cached
            assert server.tokens(ALL_PROMPTS) == expected[version]
            assert server.num_cached == before, "nothing of the old weights is used"
            assert server.version == str(version) and not server.is_paused

        found = refusal(client, follow, 99)
        assert "goes on as before" in found and "version 99 is not published yet" in found
        nowhere = InitRequest(store=(run.folder / "nothing").as_uri(), run="run")
        assert "goes on as before" in refusal(client, nowhere, 4)
        server.fail("pull 0")
        assert "goes on as before" in refusal(client, follow, 4)
        server.fail("")
        assert server.tokens(ALL_PROMPTS) == expected[3]
        assert server.version == "3" and not server.is_paused
        client.pull(follow, 4)
        assert server.tokens(ALL_PROMPTS) == expected[4]

        server.fail("load 0")
        assert "is flagged and stays paused" in refusal(client, follow, 5)
        assert "is flagged and stays paused" in refusal(client, follow, 99)
        assert server.is_paused and server.version == "4"
        server.fail("")
        client.pull(follow, 5)
        assert server.tokens(ALL_PROMPTS) == expected[5] and not server.is_paused

        assert server.call("/pause?mode=wait", {})[0] == 200  # a trainer that is killed here
        assert server.call("/start_weight_update", {})[0] == 200
        another = VLLMClient(server.url)  # that of the next one
        another.pull(follow, 6)
        assert server.tokens(ALL_PROMPTS) == expected[6] and server.version == "6"

        server.kill()
        with pytest.raises(ChannelError):
            another.pull(follow, 7)
        with server:
            assert server.tokens(ALL_PROMPTS) == expected[0]
            another.pull(follow, 7)
            assert server.tokens(ALL_PROMPTS) == expected[7] and server.version == "7"


@pytest.fixture
def pair(run: Run) -> Iterator[Server]:
    """A server of two tensor-parallel ranks."""
    with Server(run.checkpoint(0), run.folder / "pair.log", num_ranks=2) as server:
        yield server


def test_two_ranks_follow_together(run: Run, follow: InitRequest, pair: Server) -> None:
    client = VLLMClient(pair.url)
    expected = [pair.reload(run.checkpoint(v), ALL_PROMPTS) for v in range(NUM_VERSIONS)]
    assert len({str(tokens) for tokens in expected}) > NUM_VERSIONS // 2, "the versions differ"
    for version in range(3):
        client.pull(follow, version)
        assert pair.tokens(ALL_PROMPTS) == expected[version]
    for fault in ("pull 0", "pull 1"):
        pair.fail(fault)
        found = refusal(client, follow, 3)
        assert "goes on as before" in found and f"rank {fault[-1]}" in found
        assert pair.tokens(ALL_PROMPTS) == expected[2] and not pair.is_paused
    for version, fault in ((3, "load 0"), (4, "load 1")):
        pair.fail(fault)
        found = refusal(client, follow, version)
        assert "flagged and stays paused" in found and f"rank {fault[-1]}" in found
        pair.fail("")
        client.pull(follow, version)
        assert pair.tokens(ALL_PROMPTS) == expected[version] and not pair.is_paused
        assert pair.version == str(version)
    for version in range(5, NUM_VERSIONS):
        client.pull(follow, version)
        assert pair.tokens(ALL_PROMPTS) == expected[version]

    pair.fail("load 0")
    with pytest.raises(ChainError, match="flagged and stays paused"):
        client.pull(follow, NUM_VERSIONS - 1, is_full=True)
    assert pair.call("/resume", {})[0] == 200  # by somebody who does not know
    with pytest.raises((OSError, AssertionError)):
        pair.tokens(PROMPTS)
