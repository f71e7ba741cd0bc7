"""Who may talk to the server: decided from a request's headers alone.

Three questions, each of them enough to refuse:

    host      the name that the client used must be one of ours; a web page that points its own
              name at this machine (DNS rebinding) cannot fake it
    origin    browsers say which page sends; only pages of this machine may
    key       one of the configured keys, where there are any
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b, sha256
from ipaddress import ip_address
from urllib.parse import urlsplit

from kvws.errors import ConfigError, HostRefused, NotAuthorised

Headers = Mapping[str, str]
"""Header values by lower-case name; the first of several."""

_LOOPBACK_NAMES = ("127.0.0.1", "localhost", "::1")
_HOST = re.compile(r"(?:(?P<name>[^:\[\]@]+)|\[(?P<address>[0-9a-f:.]+)\])(?::\d{1,5})?")


def header_map(raw: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Headers as ASGI has them, by name. A client cannot override one by repeating it."""
    headers: dict[str, str] = {}
    for name, value in raw:
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


class Gatekeeper:
    """Lets requests in or says why not."""

    def __init__(self, keys: Iterable[str], host: str, allowed_hosts: Iterable[str]) -> None:
        """Raises:
        ConfigError: the server could be reached from elsewhere without a key.
        """
        self._key_digests = {_digest(_key_bytes(key)): salt_of(key) for key in keys if key}
        if not self._key_digests and not is_loopback(host):
            raise ConfigError(
                f"{host or 'every address'} can be reached from other machines, and no key is set",
                hint="set KVWS_API_KEY, or serve on 127.0.0.1",
            )
        ours = (*_LOOPBACK_NAMES, host, *allowed_hosts)
        self._hosts = frozenset(name.strip("[]").lower() for name in ours if name)

    def check_host(self, headers: Headers) -> None:
        """Raises:
        HostRefused: the request was meant for another name, or a foreign web page sent it.
        """
        name = _host_name(headers.get("host", ""))
        if name not in self._hosts:
            raise HostRefused(
                "this server does not answer to the name in the Host header",
                hint="call it by the address it serves on, or allow the name with --allow-host",
            )
        origin = headers.get("origin")
        if origin is not None and not is_loopback(_origin_name(origin)):
            raise HostRefused(
                "web pages of other sites may not call this server",
                hint="call it from a program, or from a page served on this machine",
            )

    def salt(self, headers: Headers) -> str:
        """Salt of the key that a request carries.

        Raises:
            NotAuthorised: keys are set, and it carries none of them.
        """
        if not self._key_digests:
            return salt_of("")
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        offered = [headers.get("x-api-key", "")]
        if scheme.lower() == "bearer":
            offered.insert(0, bearer.strip())
        for key in filter(None, offered):
            if salt := self._salt_of_digest(_digest(key.encode("latin-1"))):
                return salt
        raise NotAuthorised(
            "the API key is missing or wrong",
            hint="send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'",
        )

    def _salt_of_digest(self, offered: bytes) -> str:
        """Every key is looked at, in the same time, whichever matches."""
        found = ""
        for digest, salt in self._key_digests.items():
            if hmac.compare_digest(digest, offered):
                found = salt
        return found


def salt_of(key: str) -> str:
    """What keeps the sessions of one key apart from those of another; "" is no key at all.

    The same in every run, and says nothing about the key.
    """
    return blake2b(_key_bytes(key), digest_size=16, person=b"kvws-salt").hexdigest()


def is_loopback(host: str) -> bool:
    """Whether only this machine can be meant by a name or address."""
    name = host.strip("[]").lower()
    if name == "localhost":
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _key_bytes(key: str) -> bytes:
    """A key as it was typed or read from the environment, as clients send it."""
    return key.encode("utf-8", "surrogateescape")


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()


def _host_name(host: str) -> str:
    """The name in a Host header: "[::1]:80" is "::1", "Name:80" is "name"; "" if it has none."""
    match = _HOST.fullmatch(host.strip().lower())
    return (match["name"] or match["address"]) if match else ""


def _origin_name(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""
