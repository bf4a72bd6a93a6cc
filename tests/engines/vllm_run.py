"""A run of a tiny random model: its store, its checkpoints, and engine processes beside it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PretrainedConfig

from gymfast.sync import Publisher

WORKER = Path(__file__).with_name("vllm_process.py")
Record = dict[str, Any]


class Run:
    """Versions of one model: published to a store, and saved as a checkpoint each."""

    def __init__(self, folder: Path, config: PretrainedConfig) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self._generator = torch.Generator().manual_seed(1)
        self._base = folder / "base"
        AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(self._base)
        self.weights = load_file(self._base / "model.safetensors")
        self.restart()
        self.publish([])

    @property
    def store(self) -> str:
        return (self.folder / "store").as_uri()

    @property
    def follows(self) -> dict[str, str]:
        return {"store": self.store, "run": "run"}

    def checkpoint(self, version: int) -> str:
        return str(self.folder / f"v{version}")

    def restart(self) -> None:
        """From here on another trainer publishes to the run."""
        self._publisher = Publisher(self.store, "run", anchor_every=4)

    def publish(self, names: list[str]) -> None:
        """The next version: some bits of 2 % of the elements of each of these tensors flip."""
        for name in names:
            bits = self.weights[name].view(torch.int16).reshape(-1)
            chosen = torch.randperm(bits.numel(), generator=self._generator)
            chosen = chosen[: max(1, bits.numel() // 50)]
            bits[chosen] ^= torch.randint(1, 64, (len(chosen),), generator=self._generator).short()
        version = self._publisher.publish(self.weights).version
        checkpoint = Path(self.checkpoint(version))
        checkpoint.mkdir()
        save_file(self.weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
        shutil.copy(self._base / "config.json", checkpoint)

    def engine(self, name: str, version: int, steps: list[list[Any]], **plan: Any) -> list[Record]:
        """Records of the steps of an engine that loaded that version; fewer if it was killed."""
        out, log = self.folder / f"{name}.jsonl", self.folder / f"{name}.log"
        plan |= {"model": self.checkpoint(version), "steps": steps, "out": str(out)}
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(plan))
        out.touch()
        with log.open("w") as file:
            done = subprocess.run(
                [sys.executable, str(WORKER), str(path)],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=280,
                check=False,
            )
        records = [json.loads(line) for line in out.read_text().splitlines()]
        assert done.returncode in (0, -9), log.read_text()[-4000:]
        assert len(records) == len(steps) or done.returncode == -9
        return records
