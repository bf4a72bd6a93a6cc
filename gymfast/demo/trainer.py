"""The trainer process of the demo: warm-up, then versions through gymfast.sync.Publisher."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import msgspec

from gymfast.demo import events
from gymfast.demo.audit import NamedBytes, fingerprint
from gymfast.demo.damage import DamagingStore
from gymfast.demo.learning import Learner, StepReport
from gymfast.demo.options import RUN, DemoOptions
from gymfast.demo.processes import end_with_parent
from gymfast.demo.text import load_text
from gymfast.demo.transformer import Parameters, load_torch
from gymfast.errors import GymfastError
from gymfast.stores import FileStore
from gymfast.sync import Publisher


class Trainer:
    """Trains and publishes; tells every step."""

    def __init__(self, options: DemoOptions, store_path: Path) -> None:
        self.options = options
        self.version = -1
        self.store = DamagingStore(FileStore(store_path), self._tell_damage)
        text = load_text()
        self.learner = Learner(options.shape, options.schedule, text, options.seed)
        keep = options.num_versions + 1  # all of them: the demo replays them at the end
        self.publisher = Publisher(self.store, RUN, profile="small", anchor_every=keep, keep=keep)
        weights = self.learner.publishable()
        events.tell(
            events.TrainerReady(
                num_parameters=self.learner.num_parameters,
                num_tensors=len(weights),
                state_bytes=2 * self.learner.num_parameters,
                text_bytes=text.size,
                uses_bf16=self.learner.fast_bf16,
                torch_version=str(self.learner.torch.__version__),
            )
        )

    def run(self) -> None:
        """Warm up, publish the first full version, then one version a step."""
        self._warm_up()
        self.learner.start_policy_phase()
        self._publish(StepReport(0.0, 0.0), 0.0)
        end_s = time.monotonic() + self.options.schedule.training_limit_s
        needed = self.options.damage_version + 1
        while self.version < self.options.num_versions:
            if self.version > needed and time.monotonic() > end_s:
                break
            start_s = time.monotonic()
            report = self.learner.policy_step()
            self._publish(report, time.monotonic() - start_s)
        events.tell(events.TrainerFinished(last_version=self.version))

    def _warm_up(self) -> None:
        schedule = self.options.schedule
        end_s = time.monotonic() + schedule.warmup_limit_s
        for step in range(schedule.warmup_steps):
            loss = self.learner.warmup_step(step)
            is_last = step + 1 == schedule.warmup_steps or time.monotonic() > end_s
            if step % 10 == 0 or is_last:
                events.tell(
                    events.WarmupStep(step=step + 1, num_steps=schedule.warmup_steps, loss=loss)
                )
            if is_last:
                return

    def _publish(self, report: StepReport, step_s: float) -> None:
        self.version += 1
        weights = self.learner.publishable()
        truth = fingerprint(_named_bytes(weights))
        if self.version == self.options.damage_version:
            self.store.arm()
        start_s = time.monotonic()
        result = self.publisher.publish(weights, version=self.version)
        events.tell(
            events.Published(
                version=result.version,
                kind=result.kind,
                root=result.root,
                fingerprint=truth,
                num_changed=result.num_changed,
                raw_bytes=result.raw_bytes,
                frame_bytes=result.frame_bytes,
                reward=report.reward,
                step_s=step_s,
                publish_s=time.monotonic() - start_s,
            )
        )

    def _tell_damage(self, key: str, offset: int) -> None:
        events.tell(events.Damaged(version=self.version, key=key, offset=offset))


def _named_bytes(weights: Parameters) -> list[NamedBytes]:
    torch = load_torch()
    return [(name, value.view(torch.uint8).numpy().data) for name, value in weights.items()]


def main(arguments: list[str]) -> int:
    """Run the trainer: arguments are the options as JSON and the folder of the store."""
    end_with_parent()
    try:
        options = msgspec.json.decode(arguments[0], type=DemoOptions)
        Trainer(options, Path(arguments[1])).run()
    except GymfastError as error:
        events.tell(events.Failed(error=type(error).__name__, message=str(error)))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
