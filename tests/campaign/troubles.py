"""What happens to a run without anybody being wrong: objects decay, somebody forges records."""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass

from gymfast.errors import (
    GymfastError,
)
from gymfast.sync.keys import number_of
from tests.campaign.ground import damaged
from tests.campaign.parties import Scene
from tests.campaign.simulation import Process

FORGED_KEY = b"forged-key-4242424242424"


@dataclass
class Decay:
    """Bits of the store that rot: objects, leases, hints, unsigned records; objects vanish."""

    scene: Scene

    def work(self, process: Process) -> None:
        scene, rng = self.scene, self.scene.simulation.rng
        while not scene.is_quiet:
            process.sleep(rng.expovariate(1 / 12))
            contents = scene.ground.contents()
            keys = [k for k in contents if k.startswith(f"{scene.model.run}/") and contents[k]]
            if not keys or scene.is_quiet:
                continue
            key = rng.choice(keys)
            if scene.key is not None and number_of(key, scene.model.keys.log_prefix):
                continue  # a signature that does not fit is forgery, and stops a publisher
            gone = "/objects/" in key and rng.random() < 0.4
            blob = None if gone else damaged(contents[key], rng)
            scene.ground.effect(process, "delete" if gone else "put", key, blob)
            scene.note(process, f"'{key}' {'vanishes' if gone else 'rots'}")
            scene.counts["objects damaged"] += 1


@dataclass
class Forger:
    """May write to the store, has no key; what it did is taken back after a while."""

    scene: Scene

    def work(self, process: Process) -> None:
        scene, rng = self.scene, self.scene.simulation.rng
        while not scene.is_quiet:
            process.sleep(rng.expovariate(1 / 8))
            made = self._forgery(rng)
            if made is None or scene.is_quiet:
                continue
            key, blob = made
            scene.ground.effect(process, "put", key, blob)
            scene.note(process, f"forged '{key}'")
            scene.counts.check("I82", True, "")
            process.sleep(rng.uniform(1, 15))
            self._take_back(process, key)

    def _take_back(self, process: Process, key: str) -> None:
        seq = number_of(key, self.scene.model.keys.log_prefix)
        last = self.scene.model.last
        if seq is not None and last is not None and seq <= last["seq"] and self._was_passed(seq):
            return  # a publisher went on behind it: the log goes over the forgery now
        true = self.scene.model.honest.get(key)
        self.scene.ground.effect(process, "delete" if true is None else "put", key, true)
        self.scene.note(process, f"took '{key}' back")

    def _was_passed(self, seq: int) -> bool:
        """True if the record after that place was written while something else lay there."""
        model = self.scene.model
        after, true = (
            model.honest.get(model.keys.record(seq + 1)),
            model.honest.get(model.keys.record(seq)),
        )
        if after is None:
            return False
        return true is None or json.loads(after)["previous"] != hashlib.sha256(true).hexdigest()

    def _forgery(self, rng) -> tuple[str, bytes] | None:
        from gymfast.sync.manifest import encode, parse_log_record, sign

        scene = self.scene
        keys, model = scene.model.keys, scene.model
        logs = [k for k in model.honest if number_of(k, keys.log_prefix)]
        if not logs or model.last is None:
            return None
        some = json.loads(model.honest[rng.choice(logs)])
        kind = rng.randrange(6)
        if kind == 0:  # goes on with the log, signed with another key or not at all
            last = {**model.last, "seq": model.last["seq"] + 1, "previous": model.last_digest}
            last |= {"nonce": f"{rng.getrandbits(128):032x}", "mac": ""}
            if last["type"] == "version":
                last |= {"version": last["version"] + 1, "base_root": last["root"]}
            blob = (json.dumps(last, separators=(",", ":")) + "\n").encode()
            with suppress(GymfastError):
                blob = encode(sign(parse_log_record(blob, "forged"), FORGED_KEY))
            return keys.record(last["seq"]), blob
        if kind == 1:  # one field of a record
            name = rng.choice([n for n in some if n not in ("type", "frame", "mac")])
            value = some[name]
            some[name] = value + 1 if isinstance(value, int) else value[::-1]
            place = keys.record(some["seq"] - (name == "seq"))
            return place, (json.dumps(some, separators=(",", ":")) + "\n").encode()
        if kind == 2:  # an older record in a later place
            return rng.choice(logs), model.honest[rng.choice(logs)]
        objects = [k for k in model.honest if "/objects/" in k]
        if kind == 3 and objects:  # an object in the place of another one
            return rng.choice(objects), model.honest[rng.choice(objects)]
        if kind == 4:
            return keys.hint, b'{"type":"hint","seq":99999}\n'
        return f"{keys.log_prefix}{rng.getrandbits(40):020d}", b"rubbish"
