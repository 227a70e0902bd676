"""The emulator behind a gate: `python -m microtuning_local.gate` is ministack, answering programs on this machine only.

ministack takes every Host name and lets pages of every origin read its answers, and its `/_ministack/…` asks for no key. So
a page in the user's browser could empty the local cloud, and by a signature with the well-known root key run code in it. A
browser always says where a request comes from (Origin, Sec-Fetch-Site), and a page that has its own name point to 127.0.0.1
(DNS rebinding) calls us by that name: neither passes.

It also writes down that the tables were saved, which ministack does at the end of a clean stop and only then: whoever
starts it next must know, and a process that was killed a moment ago cannot be told from one that ends by itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    App = Callable[[dict[str, Any], Any, Callable[[dict[str, Any]], Awaitable[None]]], Awaitable[None]]

SAVED_MARK = "MICROTUNING_SAVED_MARK"
_FROM_A_BROWSER = (b"origin", b"sec-fetch-site")
_OPEN = ("/_ministack/health", "/_ministack/ready")
_LOCAL_NAMES = ("127.0.0.1", "localhost")


def gated(app: App) -> App:
    """The ASGI app with the gate before it."""

    async def enter(scope: dict[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan" or (is_local_program(scope.get("headers", [])) and is_open(scope["path"])):
            await app(scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    return enter


def is_open(path: str) -> bool:
    """Everything but ministack's own administration, which needs no key and could empty the cloud."""
    own = "/_ministack", "/_localstack"
    return path in _OPEN or not path.lower().startswith(own)


def is_local_program(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a request calls this machine by its own name, and no page sent it."""
    hosts = [value for name, value in headers if name.lower() == b"host"]
    is_from_browser = any(name.lower() in _FROM_A_BROWSER for name, _ in headers)
    return not is_from_browser and len(hosts) == 1 and _is_own_name(hosts[0].decode("latin-1"))


def _is_own_name(host: str) -> bool:
    """127.0.0.1 and localhost, and names below localhost, which no resolver sends elsewhere (bucket.localhost)."""
    name, _, port = host.lower().rpartition(":") if ":" in host else (host.lower(), "", "")
    return (name in _LOCAL_NAMES or name.endswith(".localhost")) and (not port or port.isdigit())


async def _refuse(send: Any) -> None:
    body = json.dumps(
        {"__type": "AccessDeniedException", "message": "Only programs on this machine may call."}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def marking(app: App, mark: Path) -> App:
    """The ASGI app, with the mark made at the end of its shutdown."""

    async def enter(scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def told(message: dict[str, Any]) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                mark.touch()
            await send(message)

        await app(scope, receive, told if scope["type"] == "lifespan" else send)

    return enter


def main() -> None:
    from ministack import app as ministack

    mark = Path(os.environ[SAVED_MARK])
    mark.unlink(missing_ok=True)
    ministack.app = marking(gated(ministack.app), mark)
    ministack.main()


if __name__ == "__main__":
    main()
