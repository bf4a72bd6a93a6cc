"""The tests of tests/delta that name rules of payloads, run on the Triton back end."""

from delta.test_spec_rules_payload import *  # noqa: F403
