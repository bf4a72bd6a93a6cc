"""The part of Modal's service that Volumes need, on loopback, for the unmodified `modal` package.

Files appear when a put is complete and are read from what was complete then. `fail` makes calls
fail, `lose_replies` lets a call take effect and fails its answer, `hang` never answers.
"""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from collections import Counter
from typing import Any

import grpclib
import modal_proto.api_grpc
from aiohttp import web
from google.protobuf import empty_pb2
from grpclib.const import Status
from grpclib.server import Server
from modal_proto import api_pb2

BLOCK_BYTES = 8 << 20
_DEADLINE_S = 30


async def _unimplemented(stream: Any) -> None:
    raise grpclib.GRPCError(Status.UNIMPLEMENTED, "not a part of this server")


class _Service(modal_proto.api_grpc.ModalClientBase):
    def __init__(self, server: ModalServer) -> None:
        self.server = server

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, name)
        if name[0].isupper() and getattr(own, "__isabstractmethod__", False):
            return _unimplemented
        return own

    async def ClientHello(self, stream: Any) -> None:
        await stream.recv_message()
        await stream.send_message(api_pb2.ClientHelloResponse())


_Service.__abstractmethods__ = frozenset()


class ModalServer:
    """Volumes by name, each with files by path."""

    def __init__(self, version: int = 2) -> None:
        self.version = version
        self.volumes: dict[str, dict[str, bytes]] = {}
        self.blocks: dict[str, bytes] = {}
        self.calls: Counter[str] = Counter()
        self.fail: dict[str, list[Status]] = {}
        self.lose_replies: Counter[str] = Counter()
        self.hang: set[str] = set()
        self._reads: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._stopped = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=[self._serve()])

    def __enter__(self) -> ModalServer:
        self._thread.start()
        assert self._started.wait(_DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(_DEADLINE_S)
        assert not self._thread.is_alive()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to reach this server."""
        return {
            "MODAL_SERVER_URL": f"http://127.0.0.1:{self.port}",
            "MODAL_TOKEN_ID": "ak-of-the-tests",
            "MODAL_TOKEN_SECRET": "as-of-the-tests",
        }

    async def _serve(self) -> None:
        service = _Service(self)
        for name in dir(self):
            if name.startswith("on_"):
                setattr(service, name[3:], self._handler(name[3:], getattr(self, name)))
        app = web.Application(client_max_size=2 * BLOCK_BYTES)
        app.add_routes(
            [web.put("/put", self._put_block), web.get("/get/{read}/{index}", self._get)]
        )
        runner = web.AppRunner(app)
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", 0))
        await web.SockSite(runner, listener).start()
        self.blocks_url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        grpc_socket = socket.create_server(("127.0.0.1", 0))
        self.port = grpc_socket.getsockname()[1]
        server = Server([service])
        await server.start(sock=grpc_socket)
        self._started.set()
        await self._stopped.wait()
        server.close()
        await runner.cleanup()

    def _handler(self, name: str, answer: Any) -> Any:
        async def handle(stream: Any) -> None:
            request = await stream.recv_message()
            self.calls[name] += 1
            if name in self.hang:
                await asyncio.sleep(3600)
            if self.fail.get(name):
                raise grpclib.GRPCError(self.fail[name].pop(0), "told to fail")
            reply = answer(request)
            if self.lose_replies[name]:
                self.lose_replies[name] -= 1
                raise grpclib.GRPCError(Status.UNAVAILABLE, "told to lose the reply")
            await stream.send_message(reply)

        return handle

    def _files(self, volume_id: str) -> dict[str, bytes]:
        return self.volumes[volume_id.removeprefix("vo-")]

    def on_VolumeGetOrCreate(self, request: Any) -> Any:
        name = request.deployment_name
        if name not in self.volumes:
            if request.object_creation_type != api_pb2.OBJECT_CREATION_TYPE_CREATE_IF_MISSING:
                raise grpclib.GRPCError(Status.NOT_FOUND, f"Volume '{name}' not found")
            self.volumes[name] = {}
            self.version = request.version or 1
        metadata = api_pb2.VolumeMetadata(version=self.version, name=name)
        return api_pb2.VolumeGetOrCreateResponse(volume_id=f"vo-{name}", metadata=metadata)

    def on_VolumePutFiles2(self, request: Any) -> Any:
        missing = [
            api_pb2.VolumePutFiles2Response.MissingBlock(
                file_index=i, block_index=j, put_url=f"{self.blocks_url}/put"
            )
            for i, file in enumerate(request.files)
            for j, block in enumerate(file.blocks)
            if block.contents_sha256.hex() not in self.blocks
        ]
        if missing:
            return api_pb2.VolumePutFiles2Response(missing_blocks=missing)
        whole = {f.path.lstrip("/"): self._joined(f) for f in request.files}
        self._put(self._files(request.volume_id), whole, request.disallow_overwrite_existing_files)
        return api_pb2.VolumePutFiles2Response()

    def _joined(self, file: Any) -> bytes:
        """The bytes of a file; zeros at the end of a block do not travel."""
        blocks = [self.blocks[block.contents_sha256.hex()] for block in file.blocks]
        padded = b"".join(block.ljust(BLOCK_BYTES, b"\0") for block in blocks)
        return padded[: file.size]

    def on_MountPutFile(self, request: Any) -> Any:
        if request.WhichOneof("data_oneof") == "data":
            self.blocks[request.sha256_hex] = request.data
        return api_pb2.MountPutFileResponse(exists=request.sha256_hex in self.blocks)

    def on_VolumePutFiles(self, request: Any) -> Any:
        whole = {f.filename.lstrip("/"): self.blocks[f.sha256_hex] for f in request.files}
        self._put(self._files(request.volume_id), whole, request.disallow_overwrite_existing_files)
        return empty_pb2.Empty()

    def _put(self, files: dict[str, bytes], new: dict[str, bytes], only_new: bool) -> None:
        taken = [path for path in new if path in files]
        if only_new and taken:
            raise grpclib.GRPCError(Status.ALREADY_EXISTS, f"{taken[0]} already exists")
        files.update(new)

    def on_VolumeGetFile2(self, request: Any) -> Any:
        path = request.path.lstrip("/")
        files = self._files(request.volume_id)
        if path not in files:
            raise grpclib.GRPCError(Status.NOT_FOUND, f"{path} not found")
        data = files[path]
        self._reads.append(data)
        read = f"{self.blocks_url}/get/{len(self._reads) - 1}"
        urls = [f"{read}/{index}" for index in range(-(-len(data) // BLOCK_BYTES))]
        return api_pb2.VolumeGetFile2Response(get_urls=urls, size=len(data), len=len(data))

    def _list(self, request: Any) -> list[Any]:
        path = request.path.strip("/")
        files = self._files(request.volume_id)
        if path in files:
            return [self._entry(path, len(files[path]))]
        folder = f"{path}/" if path else ""
        below = [name for name in files if name.startswith(folder)]
        if path and not below:
            raise grpclib.GRPCError(Status.NOT_FOUND, f"{path} not found")
        folders = {
            name[: len(folder)] + "/".join(parts[: depth + 1])
            for name in below
            for parts in [name[len(folder) :].split("/")]
            for depth in range(len(parts) - 1)
        }
        deep = request.recursive
        return [
            *(self._entry(n, len(files[n])) for n in below if deep or "/" not in n[len(folder) :]),
            *(
                api_pb2.FileEntry(path=name, type=api_pb2.FileEntry.FileType.DIRECTORY)
                for name in sorted(folders)
                if deep or "/" not in name[len(folder) :]
            ),
        ]

    def _entry(self, path: str, size: int) -> Any:
        return api_pb2.FileEntry(path=path, size=size, type=api_pb2.FileEntry.FileType.FILE)

    def on_VolumeListFiles(self, request: Any) -> Any:
        return api_pb2.VolumeListFilesResponse(entries=self._list(request))

    def on_VolumeListFiles2(self, request: Any) -> Any:
        return api_pb2.VolumeListFiles2Response(entries=self._list(request))

    def on_VolumeRemoveFile(self, request: Any) -> Any:
        self._files(request.volume_id).pop(request.path.lstrip("/"), None)
        return empty_pb2.Empty()

    on_VolumeRemoveFile2 = on_VolumeRemoveFile  # noqa: N815

    async def _put_block(self, request: web.Request) -> web.Response:
        data = await request.read()
        digest = hashlib.sha256(data)
        self.blocks[digest.hexdigest()] = data
        return web.Response(body=digest.digest())

    async def _get(self, request: web.Request) -> web.Response:
        start = int(request.match_info["index"]) * BLOCK_BYTES
        return web.Response(
            body=self._reads[int(request.match_info["read"])][start : start + BLOCK_BYTES]
        )
