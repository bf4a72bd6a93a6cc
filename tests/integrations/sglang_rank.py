"""One of two ranks of an engine: does what a JSON list of steps says and prints what it saw.

`python -m integrations.sglang_rank RANK STORE_FILE STEPS.json`
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path
from typing import Any

import torch
from integrations.sglang_stand_in import deserialize, install_sglang
from integrations.sglang_toy import ToyModel

from gymfast.integrations.sglang import load


def main(rank: int, store_file: str, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    store = torch.distributed.FileStore(store_file, 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    sys.modules.update(install_sglang(2, torch.distributed.group.WORLD))
    model, seen = ToyModel(), []
    for step in steps:
        model.break_after = step["break_after"][rank]
        for payload in step["payloads"][rank]:
            load(model, deserialize(base64.b64decode(payload)))
        status = model.gymfast_loader.status
        weights = {n: v.view(torch.int16).tolist() for n, v in model.named_parameters()}
        seen.append({"error": status.error, "is_flagged": status.is_flagged, "weights": weights})
    return seen


if __name__ == "__main__":
    print(
        json.dumps(main(int(sys.argv[1]), sys.argv[2], json.loads(Path(sys.argv[3]).read_text())))
    )
