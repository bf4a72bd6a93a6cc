"""Only for the launcher: tells what it was started with."""

import sys

from openrlhf.trainer.ray import ppo_actor, vllm_engine

if __name__ == "__main__":
    print(sys.argv)
    print(
        [ppo_actor.ActorPPOTrainer.__name__, hasattr(vllm_engine.RolloutRayActor, "gymfast_pull")]
    )
