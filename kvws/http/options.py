"""What an operator decides about the endpoint."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class FrontOptions:
    """Who may call, and how much of it at once.

    Attributes:
        keys: API keys; any of them opens every route. Without one, only programs on this machine
            can reach the server, because it binds to loopback only.
        host: the name or address that the server binds to.
        allowed_hosts: further names that clients may reach it by.
        body_max_bytes: largest request body.
        body_stall_s: longest silence of a client inside its body.
        answering_max: requests that are worked on at a time.
        waiting_max: requests that may wait for their turn beside those.
        per_session_max: requests of one session that are worked on at a time.
        ping_after_s: silence after which a stream says that the server is alive.
        stay_alive_after_s: silence, but for pings, after which it resets the client's watchdog.
        write_stall_s: how long a client may leave a stream unread before it is given up.
    """

    keys: tuple[str, ...] = field(default=(), repr=False)
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    body_max_bytes: int = 64 << 20
    body_stall_s: float = 60.0
    answering_max: int = 32
    waiting_max: int = 64
    per_session_max: int = 16
    ping_after_s: float = 15.0
    stay_alive_after_s: float = 120.0
    write_stall_s: float = 300.0
