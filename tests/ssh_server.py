"""An SFTP server over real sockets, in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import asyncssh
import pytest

USER = "trainer-of-tests"
PASSWORD = "open-sesame-not-for-eyes"


class _Door(asyncssh.SSHServer):
    def begin_auth(self, username: str) -> bool:
        return True

    def password_auth_supported(self) -> bool:
        return True

    def validate_password(self, username: str, password: str) -> bool:
        return (username, password) == (USER, PASSWORD)


@contextmanager
def serve_sftp(root: Path) -> Iterator[int]:
    """The port of a server on this machine that shows the folder as its root."""
    root.mkdir(exist_ok=True)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    async def start() -> asyncssh.SSHAcceptor:
        return await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=_Door,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            sftp_factory=lambda channel: asyncssh.SFTPServer(channel, chroot=str(root)),
        )

    async def stop() -> None:
        server.close()
        await server.wait_closed()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(start(), loop).result(60)
    try:
        yield server.get_port()
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
        loop.close()


def sftp_settings(monkeypatch: pytest.MonkeyPatch, password: str = PASSWORD) -> None:
    """Lets fsspec, here and in processes that are started, log in."""
    from fsspec.config import conf

    monkeypatch.setenv("FSSPEC_SFTP_USERNAME", USER)
    monkeypatch.setenv("FSSPEC_SFTP_PASSWORD", password)
    monkeypatch.setitem(conf, "sftp", {"username": USER, "password": password})
