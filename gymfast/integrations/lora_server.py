"""The calls that load and unload adapters on a vLLM or SGLang server. See docs/adapters.md.

Source: vLLM 0.32 (entrypoints/serve/lora, entrypoints/openai/models/serving.py) and SGLang 0.5.23
(srt/managers/tokenizer_control_mixin.py, srt/managers/io_struct.py).
"""

from __future__ import annotations

from typing import Protocol

from gymfast.errors import ChainError, ChannelError
from gymfast.integrations.engine_http import Answer, EngineHttp


class LoraServer(Protocol):
    """One server. Raises ChainError for a refusal, ChannelError if it is not known what it did."""

    url: str
    can_replace: bool  # an adapter by another under the same name; such a server lists all it has
    waits_in_unload: bool  # for running requests, and does not load or unload meanwhile

    def load(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Makes a folder of PEFT's files servable under a name that is new, unless `replaces`."""

    def unload(self, name: str) -> None:
        """Takes a name away; a name that is not there is no error."""

    def resident(self) -> dict[str, str]:
        """Where the files of each adapter lie that requests may name."""


class VLLMLora:
    """A vLLM server with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.

    Unloading takes the name away at once. Requests that run keep the adapter until they end; if
    vLLM drops it from its cache meanwhile it reads the files again, so they have to stay.
    """

    can_replace = True
    waits_in_unload = False

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        unload_timeout_s: float = 30.0,
    ) -> None:
        """A client; nothing is sent yet. Raises ValueError for an address that is not http(s)."""
        self._http = EngineHttp(url, api_key=api_key, timeout_s=timeout_s)
        self._unloads = EngineHttp(url, api_key=api_key, timeout_s=unload_timeout_s)
        self.url = self._http.url

    def load(self, name: str, path: str, *, replaces: bool = False) -> None:
        fields = {"lora_name": name, "lora_path": path, "load_inplace": replaces}
        answer = self._http.call("/v1/load_lora_adapter", fields)
        _check(answer, f"{self.url}/v1/load_lora_adapter of {name!r}", _NEEDS_VLLM)

    def unload(self, name: str) -> None:
        answer = self._unloads.call("/v1/unload_lora_adapter", {"lora_name": name})
        if answer.code == 404 and "cannot be found" in answer.text:
            return
        _check(answer, f"{self.url}/v1/unload_lora_adapter of {name!r}", _NEEDS_VLLM)

    def resident(self) -> dict[str, str]:
        return _listed(self._unloads)


class SGLangLora:
    """An SGLang server with --enable-lora.

    Unloading takes the name away at once, then waits for the requests that run on the adapter, and
    the server loads and unloads nothing else meanwhile: so the wait is bounded here, not there.
    """

    can_replace = False
    waits_in_unload = True

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 300.0,
        unload_timeout_s: float = 30.0,
    ) -> None:
        """A client; nothing is sent yet. Raises ValueError for an address that is not http(s)."""
        self._http = EngineHttp(url, api_key=api_key, timeout_s=timeout_s)
        self._unloads = EngineHttp(url, api_key=api_key, timeout_s=unload_timeout_s)
        self.url = self._http.url

    def load(self, name: str, path: str, *, replaces: bool = False) -> None:
        if replaces:
            raise ValueError("SGLang refuses a name that is loaded: give each version its own")
        answer = self._http.call("/load_lora_adapter", {"lora_name": name, "lora_path": path})
        _check(answer, f"{self.url}/load_lora_adapter of {name!r}", _NEEDS_SGLANG)

    def unload(self, name: str) -> None:
        answer = self._unloads.call("/unload_lora_adapter", {"lora_name": name})
        if answer.code == 400 and f"LoRA with name {name} does not exist" in answer.text:
            return
        _check(answer, f"{self.url}/unload_lora_adapter of {name!r}", _NEEDS_SGLANG)

    def resident(self) -> dict[str, str]:
        return _listed(self._unloads)


_NEEDS_VLLM = "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
_NEEDS_SGLANG = "--enable-lora"


def _check(answer: Answer, what: str, needs: str) -> None:
    if answer.is_success:
        return
    detail = answer.body.get("detail") if isinstance(answer.body, dict) else None
    if answer.code == 404 and detail == "Not Found":
        raise ChainError(f"{what}: there is no such call; the server needs {needs}")
    if answer.code <= 500:  # 500: vLLM's workers refused; above that a proxy speaks
        raise ChainError(f"{what} was refused with {answer.code}: {answer.text}")
    raise ChannelError(f"{what} was answered {answer.code}: {answer.text}; it may be done or not")


def _listed(http: EngineHttp) -> dict[str, str]:
    body = http.require("/v1/models")
    cards = body.get("data") if isinstance(body, dict) else None
    if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
        raise ChannelError(f"{http.url}/v1/models gives no list of models: {str(body)[:200]}")
    # A model itself has no parent; an adapter has the model as its parent, its files as its root.
    return {str(card.get("id")): str(card.get("root")) for card in cards if card.get("parent")}
