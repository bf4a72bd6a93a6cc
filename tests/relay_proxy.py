"""A line to HOST:PORT with the faults that a JSON object names, on a node of a network.

Says its address, and the number of faults for each line that it is told.
"""

from __future__ import annotations

import json
import sys

from bad_network import BadNetwork, Faults


def main(host: str, port: str, faults: str, seed: str) -> None:
    line = BadNetwork((host, int(port)), Faults(**json.loads(faults)), int(seed))
    address, port_number = line.address
    print(json.dumps({"address": f"{address}:{port_number}"}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"faults": line.num_faults}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
