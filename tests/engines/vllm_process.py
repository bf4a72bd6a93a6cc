"""One process with one real vLLM engine: does what a JSON plan says, writes what it saw.

Run by tests/engines/vllm_real.py as `python vllm_process.py PLAN.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from inspect import signature
from pathlib import Path
from typing import Any

PROMPTS = [[1, 2, 3, 4, 5], [400, 7, 99], list(range(40, 72))]


def main(plan: dict[str, Any]) -> None:
    engine = Engine(plan)
    for step in plan["steps"]:
        record = {"step": step} | getattr(engine, step[0])(*step[1:])
        with Path(plan["out"]).open("a") as out:
            out.write(json.dumps(record) + "\n")


class Engine:
    """A vLLM engine in this process and the steps of a plan."""

    def __init__(self, plan: dict[str, Any]) -> None:
        from vllm import LLM

        self._prompts = plan.get("prompts", PROMPTS)
        options: dict[str, Any] = {}
        if "follows" in plan:
            options["weight_transfer_config"] = {"backend": "gymfast"}
        self.llm = LLM(
            plan["model"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=128,
            dtype="bfloat16",
            **options,
        )
        if "follows" in plan:
            self.llm.init_weight_transfer_engine({"init_info": plan["follows"]})
            self.break_loader(0, "")
            self._watch_loader()

    def update(self, request: dict[str, Any]) -> dict[str, Any]:
        """An update as a trainer asks for it; to its end, unless more buckets follow."""
        num_before = self._num_calls
        self._start()
        with Caught() as caught:
            self.llm.update_weights({"update_info": request})
        if caught.text:
            return {"error": caught.text}
        if not request.get("is_last", True):
            return {}
        self.llm.finish_weight_update()
        self.llm.reset_prefix_cache()
        return self.look() | {"num_calls": self._num_calls - num_before}

    def look(self) -> dict[str, Any]:
        """Greedy tokens, and a digest of what every layer computes with."""
        return {"tokens": self._tokens(), "weights": self.llm.apply_model(digests)[0]}

    def reload(self, path: str) -> dict[str, Any]:
        """vLLM's own reload of a checkpoint: what an update has to be equal to."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        self.llm.reset_prefix_cache()
        return self.look()

    def generate(self) -> dict[str, Any]:
        """The tokens, or the error that refuses them."""
        with Caught() as caught:
            return {"tokens": self._tokens()}
        requests = list(self.llm.llm_engine.output_processor.request_states)
        self.llm.llm_engine.abort_request(requests, internal=True)
        return {"error": caught.text}

    def finish(self) -> dict[str, Any]:
        """The end of an update, even if nothing was updated."""
        self._start()
        with Caught() as caught:
            self.llm.finish_weight_update()
        return {"error": caught.text}

    def break_loader(self, at_call: int, how: str) -> dict[str, Any]:
        """The loader fails, or the process is killed, in one of its next calls; 0 repairs it."""
        self._num_calls, self._break_at, self._break_how = 0, at_call, how
        return {}

    def _watch_loader(self) -> None:
        """Counts the calls of the model's loader, and breaks one of them."""
        model = self._worker().model_runner.get_model()
        load = model.load_weights

        def watched(weights: Any) -> Any:
            self._num_calls += 1
            if self._num_calls != self._break_at:
                return load(weights)
            load([next(iter(weights))])
            if self._break_how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("injected: the loader failed")

        model.load_weights = watched

    def _start(self) -> None:
        if self._worker()._weight_update_active:
            return
        if "is_checkpoint_format" in signature(self.llm.start_weight_update).parameters:  # 0.24
            self.llm.start_weight_update(is_checkpoint_format=False)
        else:
            self.llm.start_weight_update()

    def _worker(self) -> Any:
        return self.llm.llm_engine.model_executor.driver_worker.worker

    def _tokens(self) -> list[list[int]]:
        from vllm import SamplingParams

        greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in self._prompts]
        outputs = self.llm.generate(prompts, greedy, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class Caught:
    """Keeps the text of an error that is raised inside, and goes on: "" if there is none."""

    text = ""

    def __enter__(self) -> Caught:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self.text = f"{kind.__name__}: {error}" if kind else ""
        return kind is not None and issubclass(kind, Exception)


def digests(model: Any) -> dict[str, str]:
    """SHA-256 of every tensor; of packed layers what they make of the identity: their weight."""
    import torch

    found = {}
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        found[name] = _sha(tensor)
    for name, module in model.named_modules():
        if hasattr(module, "cpu_linear"):
            sizes = ("input_size_per_partition", "input_size", "embedding_dim")
            size = next(getattr(module, size) for size in sizes if hasattr(module, size))
            identity = torch.eye(size, dtype=module.weight.dtype)
            found[f"{name} packed"] = _sha(module.cpu_linear(identity, module.weight, None))
    return found


def _sha(tensor: Any) -> str:
    import torch

    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()[:16]


if __name__ == "__main__":
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    main(json.loads(Path(sys.argv[1]).read_text()))
