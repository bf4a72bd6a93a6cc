"""Options of an adapter whose trainer and readers are given the same ones by their framework."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import msgspec

from gymfast.integrations.canonical import CanonicalCopy
from gymfast.integrations.update_request import InitRequest
from gymfast.key_file import read_key_file
from gymfast.sync import Publisher
from gymfast.sync.publish_report import DEFAULT_ANCHOR_EVERY, DEFAULT_KEEP

_Text = Annotated[str, msgspec.Meta(min_length=1)]
_Seconds = Annotated[float, msgspec.Meta(gt=0)]


class RunOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Which run, and how it is written and read.

    `key_file` signs, and checks too unless `public_key_file` is given for that.
    `timeout_s` bounds each wait for the store, `sync_timeout_s` each wait for the other side.
    """

    store: _Text
    run: _Text
    key_file: str | None = None
    public_key_file: str | None = None
    staging_dir: str | None = None
    timeout_s: _Seconds = 60.0
    sync_timeout_s: _Seconds = 1800.0
    anchor_every: int = DEFAULT_ANCHOR_EVERY
    keep: int = DEFAULT_KEEP

    @classmethod
    def of(cls, options: Mapping[str, object], where: str) -> RunOptions:
        """The options that stand at `where` in the configuration of the framework.

        Raises ValueError for one that is unknown, missing or of another type, or a store that no
        other process can see.
        """
        try:
            found = msgspec.convert(dict(options), cls)
        except msgspec.ValidationError as error:
            raise ValueError(
                f"{where}: {error}; 'store' and 'run' have to be set, the others are "
                f"{', '.join(cls.__struct_fields__[2:])}"
            ) from error
        InitRequest(found.store, found.run).require_shared()
        return found

    def publisher(self) -> Publisher:
        """Takes the run over. Raises what `Publisher` raises, OSError for the key file."""
        return Publisher(
            self.store,
            self.run,
            anchor_every=self.anchor_every,
            keep=self.keep,
            timeout_s=self.timeout_s,
            key=read_key_file(self.key_file) if self.key_file else None,
        )

    def follow(self) -> CanonicalCopy:
        """A copy of no tensors yet. Raises what `InitRequest.open` raises."""
        key_file = self.public_key_file or self.key_file
        return InitRequest(self.store, self.run, self.staging_dir, self.timeout_s, key_file).open()
