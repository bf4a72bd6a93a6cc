"""The cases of `python -m benchmarks transfer`, each with its peers and bound in the same run."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import replace

from benchmarks.namespaces import Network, why_not
from benchmarks.ranks import Job, Sample, run_group
from benchmarks.transfer import MIB, NotHere, Options, Row, Subject
from benchmarks.transfer_peers import copies, iperf3
from gymfast.cost import Stage, pipeline_s
from gymfast.models import model, tensors_of

Tensors = list[tuple[str, str, tuple[int, ...], int]]
_STREAMS = (1, 2, 4)
_BUCKETS = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB)
_LORA_RANK, _LORA_LAYERS = 32, 3
ARTICLE_WIRE_S = 0.26


def loopback(options: Options) -> Iterator[Row]:
    """Channels between two processes of this host, in real memory, beside what could be had."""
    size = options.size_bytes
    base = Subject("loopback", "memcpy", "flat", size, ranks=1)
    copy_gbps = base.row(copies(size, options.rounds)).algbw  # to predict with
    best: Row | None = None
    for streams in _STREAMS:
        subject = Subject("loopback", "iperf3", "flat", size, streams=streams)
        try:
            row = _of_peer(subject, iperf3(size, streams, options.rounds))
        except OSError as reason:
            raise NotHere(f"needs iperf3: {reason}") from reason
        best = row if best is None or row.algbw > best.algbw else best
        yield row
    assert best is not None
    bound, bound_gbps = f"iperf3 x{best.streams}", best.algbw
    subjects, jobs = [], []
    for kind, path in (("channel", "tcp"), ("transfer", "tcp transfer")):
        for streams in _STREAMS if kind == "channel" else (1,):
            for bucket in _BUCKETS:
                job = Job(
                    kind=kind, tensors=_flat(size), bucket_bytes=bucket, streams=streams,
                    rounds=options.rounds,
                )  # fmt: skip
                jobs.append(job)
                stages = [Stage("wire", 0.0, bound_gbps * 1e9)]
                if kind == "transfer":
                    stages.append(Stage("digest", 0.0, 2 * copy_gbps * 1e9))
                subjects.append(
                    replace(
                        base, path=path, ranks=2, streams=streams, depth=job.depth,
                        bucket_bytes=bucket, bound=bound, bound_gbps=bound_gbps,
                        predicted_s=pipeline_s(size, bucket, stages, depth=job.depth),
                    )
                )  # fmt: skip
    for path in ("gloo", "shm"):
        if not _has_channel(path):
            continue
        if path == "shm":  # its bound is measured beside it, by one of its ranks
            jobs.append(Job(kind="copy", channel="", tensors=_flat(size), rounds=options.rounds))
            subjects.append(base)
        bounds = (bound, bound_gbps) if path == "gloo" else ("memcpy", 0.0)
        for bucket in _BUCKETS:
            job = Job(
                kind="channel", channel=path, tensors=_flat(size), bucket_bytes=bucket,
                rounds=options.rounds,
            )  # fmt: skip
            jobs.append(job)
            subjects.append(
                replace(
                    base, path=path, ranks=2, depth=job.depth, bucket_bytes=bucket,
                    bound=bounds[0], bound_gbps=bounds[1],
                )
            )  # fmt: skip
    if _has_channel("gloo"):
        jobs.append(Job(kind="per tensor", tensors=_flat(size), channel="", rounds=options.rounds))
        subjects.append(
            replace(base, path="torch gloo", ranks=2, bound=bound, bound_gbps=bound_gbps)
        )
    copy_gbps = 0.0
    for row in _rows(subjects, run_group(jobs, 2)):
        if row.path == "memcpy":
            copy_gbps = row.algbw
        is_bound = row.bound == "memcpy"
        ratio = row.algbw / copy_gbps if is_bound else 0.0
        yield replace(row, bound_gbps=copy_gbps, of_bound=ratio) if is_bound else row


def lists(options: Options) -> Iterator[Row]:
    """The tensors of a model: flat buckets against one broadcast for each, over gloo."""
    if not _has_channel("gloo"):
        raise NotHere("needs torch with gloo")
    rounds = max(5, options.rounds // 2)
    found = {"Qwen3-0.6B": qwen3(), "per-expert LoRA": per_expert_lora()}
    for name, whole in found.items():
        tensors = _part(whole, options.list_bytes)
        size = sum(one[3] for one in tensors)
        base = Subject("lists", "", f"{name}, {len(tensors)} tensors", size, type="bfloat16")
        subjects = [replace(base, path="torch gloo per tensor")]
        jobs = [Job(kind="per tensor", channel="", tensors=tensors, rounds=rounds)]
        for path in ("gloo", "tcp", "shm"):
            for bucket in (4 * MIB, 16 * MIB, 64 * MIB) if _has_channel(path) else ():
                job = Job(
                    kind="transfer", channel=path, tensors=tensors, bucket_bytes=bucket,
                    rounds=rounds,
                )  # fmt: skip
                jobs.append(job)
                path_name = f"{path} flat buckets"
                subjects.append(replace(base, path=path_name, bucket_bytes=bucket, depth=job.depth))
        rows = list(_rows(subjects, run_group(jobs, 2)))
        peer = rows[0]
        yield peer
        for row in rows[1:]:
            ratio = row.algbw / peer.algbw
            yield replace(row, bound=peer.path, bound_gbps=peer.algbw, of_bound=ratio)


def shaped(options: Options) -> Iterator[Row]:
    """One link of 1, 5 and 8 Gb/s, and a star of receivers behind one link."""
    _require_network()
    for rate_gbps in (1.0, 5.0, 8.0):
        size = min(options.size_bytes, int(rate_gbps * 70e6 // MIB * MIB))
        with Network(2, rate_gbps) as network:
            yield from _over(network, f"{rate_gbps:g} Gb/s", size, options, hops=1)
    for num_receivers in (2, 4):
        size = min(options.size_bytes, 64 * MIB)
        with Network(num_receivers + 1, 2.0) as network:
            name = f"2 Gb/s, star of {num_receivers}"
            yield from _over(network, name, size, options, hops=1, fanout=num_receivers)


def chain(options: Options) -> Iterator[Row]:
    """Four nodes in a row, each of which passes on what it receives, at 2 Gb/s."""
    _require_network()
    with Network(4, 2.0) as network:
        size = min(options.size_bytes, 238 * MIB)
        yield from _over(network, "2 Gb/s, chain of 3 hops", size, options, hops=3, fanout=1)


def live(options: Options) -> Iterator[Row]:
    """Versions end to end over 1 Gb/s: encode, send, apply, verify; then everything."""
    _require_network()
    size = options.live_bytes
    fast = Job(kind="live", size_bytes=size, rounds=options.rounds, warm_up=3)
    with Network(2, 1.0) as network:
        rate = network.payload_gbps / 8
        jobs = {
            "1 % changed, fast": fast,
            "1 % changed, small": replace_job(fast, profile="small"),
            "full version": replace_job(
                fast, max_density=0.0, rounds=max(3, options.rounds // 3), warm_up=1
            ),
        }
        found = run_group(list(jobs.values()), 2, network, timeout_s=1200)
        for (name, job), samples in zip(jobs.items(), found, strict=True):
            sent = samples[len(samples) // 2].sent_bytes
            wire_s = sent / (rate * 1e9)
            subject = Subject(
                "live", "tcp live", name, size, type="bfloat16", depth=job.depth, streams=1,
                predicted_s=wire_s, bound="line rate", bound_gbps=size / 1e9 / wire_s,
                note=_live_note(samples, wire_s),
            )  # fmt: skip
            yield subject.row(samples)


def nccl(options: Options) -> Iterator[Row]:
    """NVIDIA's own benchmark, where it is built and there is a GPU."""
    from benchmarks.nccl_tests import Missing, measure

    try:
        yield from measure(options.size_bytes, options.rounds)
    except Missing as reason:
        raise NotHere(str(reason)) from reason


def qwen3() -> Tensors:
    """Qwen3-0.6B in BF16."""
    return [(t.name, "BF16", t.shape, 2 * t.num_params) for t in tensors_of(model("Qwen3-0.6B"))]


def per_expert_lora() -> Tensors:
    """An adapter of rank 32 with factors of their own for each expert of some layers."""
    found: Tensors = []
    for tensor in tensors_of(model("Qwen3-30B-A3B")):
        layer = int(tensor.name.split(".")[2]) if ".layers." in tensor.name else -1
        if tensor.role != "routed" or layer >= _LORA_LAYERS:
            continue
        outputs, inputs = tensor.shape
        for factor, shape in (("A", (_LORA_RANK, inputs)), ("B", (outputs, _LORA_RANK))):
            name = tensor.name.replace(".weight", f".lora_{factor}.weight")
            found.append((name, "BF16", shape, 2 * shape[0] * shape[1]))
    return found


def _over(
    network: Network,
    name: str,
    size: int,
    options: Options,
    *,
    hops: int,
    fanout: int | None = None,
) -> Iterator[Row]:
    """The tcp channel on a shaped network against the pipeline formula and the link."""
    ranks = network.num_nodes
    copies_sent = 1 if fanout == 1 else ranks - 1
    rate = network.payload_gbps * 1e9 / 8 / copies_sent
    stages = [Stage(f"hop {hop}", 0.0, rate) for hop in range(hops)]
    depth = hops + 3
    subjects, jobs = [], []
    for bucket in (1 * MIB, 4 * MIB, 16 * MIB):
        for kind in ("channel", "transfer"):
            jobs.append(
                Job(
                    kind=kind, tensors=_flat(size), bucket_bytes=bucket, fanout=fanout,
                    depth=depth, rounds=max(3, options.rounds // 2),
                )
            )  # fmt: skip
            subjects.append(
                Subject(
                    "chain" if fanout == 1 else "shaped",
                    "tcp" if kind == "channel" else "tcp transfer", name, size, ranks=ranks,
                    depth=depth, bucket_bytes=bucket, bound="line rate", bound_gbps=rate / 1e9,
                    predicted_s=pipeline_s(size, bucket, stages, depth=depth),
                )
            )  # fmt: skip
    yield from _rows(subjects, run_group(jobs, ranks, network))


def replace_job(job: Job, **changes: object) -> Job:
    """A job with other settings."""
    import msgspec

    return msgspec.structs.replace(job, **changes)


def _live_note(samples: list[Sample], wire_s: float) -> str:
    """The stages of both sides in the middle round, in milliseconds."""
    middle = sorted(samples, key=lambda one: one.seconds)[len(samples) // 2]
    words = [
        f"{'publisher' if rank == '0' else 'receiver'} "
        + " ".join(f"{name} {1e3 * seconds:.0f}" for name, seconds in stages.items())
        for rank, stages in sorted(middle.stages.items())
    ]
    return f"ms: {'; '.join(words)}; wire alone {1e3 * wire_s:.0f}"


def _rows(subjects: Iterable[Subject], samples: Iterable[list[Sample]]) -> Iterator[Row]:
    for subject, found in zip(subjects, samples, strict=True):
        yield subject.row(found)


def _of_peer(subject: Subject, samples: list[Sample]) -> Row:
    """A row of a peer that moved about as many bytes; times are those of the size asked for."""
    scaled = [
        Sample(one.seconds * subject.size / one.sent_bytes, one.stages, 0, subject.size)
        for one in samples
    ]
    return subject.row(scaled)


def _require_network() -> None:
    if reason := why_not():
        raise NotHere(f"needs kernel feature network namespaces: {reason}")


def _has_channel(name: str) -> bool:
    if name == "gloo":
        return importlib.util.find_spec("torch") is not None
    return importlib.util.find_spec(f"gymfast.channels.{name}") is not None


def _flat(size: int) -> Tensors:
    return [("flat", "U8", (size,), size)]


def _part(tensors: Tensors, num_bytes: int) -> Tensors:
    """The last tensors of a list that have about so many bytes; all if they have no more."""
    found, left = [], num_bytes
    for tensor in reversed(tensors):
        if tensor[3] <= left:
            found.append(tensor)
            left -= tensor[3]
    return found[::-1]
