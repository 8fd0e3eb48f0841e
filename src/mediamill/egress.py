"""The one guarded way out: every call to an address that somebody else chose goes through here.

An address is read once, by one parser. Its host is resolved once, every answer must be allowed,
and the connection is made to one of exactly those answers, so that a name which changes its mind
between check and connect (DNS rebinding) gains nothing. The name is kept for TLS and for the Host
header. Proxy variables of the environment are not read, and no cookie or password is ever sent.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Final, Literal, TypeAlias
from urllib.parse import urljoin

import httpcore2
import httpx2

from mediamill.config import Settings
from mediamill.failures import Code, Failure

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network
Resolver: TypeAlias = Callable[[str, int], Awaitable[Iterable[str]]]

_MAX_URL: Final = 2048
_MAX_HOST: Final = 253
_TRIES: Final = 3  # addresses of one host that are tried
_RESOLVERS: Final = 16  # names looked up at once; a hung name server holds no other thread
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HOST: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_NUMBER: Final = re.compile(r"([0-9]+|0x[0-9a-f]*)", re.IGNORECASE)

# Everything that IANA keeps for special purposes, and what belongs to no single machine.
_DENIED_V4: Final = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 "
        "192.0.0.0/24 192.0.2.0/24 192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 "
        "192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24 203.0.113.0/24 "
        "224.0.0.0/4 240.0.0.0/4"
    ).split()
)
# Of IPv6 only global unicast is allowed, and of it not these: protocol assignments (Teredo among
# them), documentation, 6to4 and an anycast service.
_GLOBAL_V6: Final = IPv6Network("2000::/3")
_DENIED_V6: Final = tuple(
    IPv6Network(text)
    for text in "2001::/23 2001:db8::/32 2002::/16 2620:4f:8000::/48 3fff::/20".split()
)
_NAT64: Final = IPv6Network("64:ff9b::/96")
# What clouds answer with credentials to whoever asks from inside. Some look public. No allow-list
# opens them.
_METADATA: Final = frozenset(
    map(
        ip_address,
        (
            "169.254.169.254 169.254.170.2 169.254.170.23 169.254.169.253 168.63.129.16 "
            "100.100.100.200 192.0.0.192 fd00:ec2::254 fd00:ec2::23 fd20:ce::254 fe80::a9fe:a9fe"
        ).split(),
    )
)


class Unreachable(Failure):
    """The address may be called and did not answer as it should. `kind` says what went wrong."""

    def __init__(
        self,
        kind: Literal["dns", "connect", "tls", "timeout", "protocol", "too_large"],
        detail: str,
    ) -> None:
        super().__init__(Code.TARGET_UNREACHABLE, detail)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be called. Addresses in `allow_networks` may also be called by plain http, on any
    port and as an IP literal; `deny_networks` and the metadata addresses of clouds never."""

    allow_http: bool = False
    ports: frozenset[int] = frozenset({80, 443, 8443})
    allow_networks: tuple[Network, ...] = ()
    deny_networks: tuple[Network, ...] = ()

    @classmethod
    def of(cls, settings: Settings) -> Policy:
        """The operator's policy."""
        return cls(
            allow_http=settings.egress_allow_http,
            ports=frozenset(settings.egress_ports),
            allow_networks=tuple(map(ip_network, settings.egress_allow_networks)),
            deny_networks=tuple(map(ip_network, settings.egress_deny_networks)),
        )

    def trusts(self, address: Address) -> bool:
        """Whether the operator has opened the network of this address."""
        forms = _forms(address)
        return not (
            any(form in _METADATA for form in forms) or _within(forms, self.deny_networks)
        ) and _within(forms, self.allow_networks)

    def allows(self, address: Address) -> bool:
        """Whether this address may be called: public in every spelling, or trusted."""
        forms = _forms(address)
        if any(form in _METADATA for form in forms) or _within(forms, self.deny_networks):
            return False
        return _within(forms, self.allow_networks) or all(map(_public, forms))


@dataclass(frozen=True, slots=True)
class Caps:
    """How much of anything one call may take. Times in seconds, sizes in bytes."""

    resolve_seconds: float = 3.0
    connect_seconds: float = 3.0
    tls_seconds: float = 3.0
    first_byte_seconds: float = 10.0
    total_seconds: float = 15.0
    header_bytes: int = 16 << 10
    body_bytes: int = 16 << 10
    redirects: int = 0  # followed, each one checked anew; 0: a redirect is the answer


@dataclass(frozen=True, slots=True)
class Target:
    """An address that passed: what was read, and where alone a connection may go."""

    url: str
    scheme: str
    host: str
    port: int
    path: bytes
    addresses: tuple[Address, ...]

    @property
    def origin(self) -> str:
        """Scheme, host and port, always with the port."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}"


@dataclass(slots=True)
class Timings:
    """How long each step took, in milliseconds; None: it was not reached."""

    dns_ms: float | None = None
    connect_ms: float | None = None
    tls_ms: float | None = None
    first_byte_ms: float | None = None
    address: str | None = None  # where the connection went; for operators


@dataclass(slots=True)
class Reply:
    """An answer whose head was read. The body is read through `chunks` or `read`, or not at all."""

    url: str
    status: int
    headers: dict[str, str]  # names in lower case; of a repeated one the last
    _response: httpcore2.Response
    _limit: int

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises Unreachable `too_large` beyond the cap."""
        seen = 0
        async for chunk in self._response.aiter_stream():
            seen += len(chunk)
            if seen > self._limit:
                raise Unreachable("too_large", f"The answer has more than {self._limit:,} bytes.")
            yield chunk

    async def read(self) -> bytes:
        """The whole body. Raises Unreachable `too_large` beyond the cap."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def excerpt(self, size: int) -> bytes:
        """The first `size` bytes of the body, or what there is; the rest is not read."""
        taken = b""
        async for chunk in self._response.aiter_stream():
            taken += chunk
            if len(taken) >= size:
                break
        return taken[:size]


class Egress:
    """Calls out under one policy. Close it when done."""

    def __init__(
        self,
        policy: Policy,
        *,
        resolver: Resolver | None = None,
        tls: ssl.SSLContext | None = None,
        agent: str = "Mediamill",
    ) -> None:
        self.policy = policy
        self._threads = ThreadPoolExecutor(_RESOLVERS, thread_name_prefix="resolve")
        self._resolver = resolver or self._getaddrinfo
        self._tls = tls or ssl.create_default_context()
        self._tls.set_alpn_protocols(["http/1.1"])
        self._agent = agent

    def close(self) -> None:
        """Let go of the threads that look names up; one that hangs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def check(self, url: str, *, seconds: float = 3.0) -> Target:
        """Read an address, resolve it and hold all of it against the policy.

        Raises Failure `source_not_allowed` if it may not be called, Unreachable `dns` if its name
        cannot be looked up.
        """
        parsed = _read(url)
        scheme, host = parsed.scheme, parsed.raw_host.decode("ascii").lower()
        port = parsed.port or (443 if scheme == "https" else 80)
        literal = _literal(host)
        addresses = (literal,) if literal else await self._resolve(host, port, seconds)
        if not all(map(self.policy.allows, addresses)):
            raise _refused("The host is not on the public internet, or is closed to this service.")
        if not all(map(self.policy.trusts, addresses)):
            if literal:
                raise _refused("Use a host name in place of an IP address.")
            if scheme != "https" and not self.policy.allow_http:
                raise _refused("Use https.")
            if port not in self.policy.ports:
                raise _refused(f"Port {port} is not one that this service calls.")
        return Target(url, scheme, host, port, parsed.raw_path, addresses)

    @asynccontextmanager
    async def call(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        caps: Caps | None = None,
        timings: Timings | None = None,
    ) -> AsyncIterator[Reply]:
        """Send one request; the block gets the answer, and all of it ends within the total time.

        A redirect is followed as often as the caps allow, with GET and HEAD only; headers of the
        caller's go no further than the first origin. Raises Failure `source_not_allowed` (nothing
        was sent there) or Unreachable.
        """
        limits = caps or Caps()
        clock = timings or Timings()
        sent = {name.lower(): value for name, value in (headers or {}).items()}
        try:
            async with asyncio.timeout(limits.total_seconds) as deadline:
                for _ in range(limits.redirects + 1):
                    begun = _now()
                    target = await self.check(url, seconds=limits.resolve_seconds)
                    clock.dns_ms = _since(begun)
                    async with self._exchange(
                        method, target, headers=sent, body=body, limits=limits, clock=clock
                    ) as reply:
                        onward = reply.headers.get("location")
                        if reply.status not in _REDIRECTS or not limits.redirects or not onward:
                            yield reply
                            return
                    url, sent = _next_hop(method, target, onward, sent)
                raise Unreachable("protocol", f"More than {limits.redirects} redirects.")
        except TimeoutError:
            if not deadline.expired():
                raise
            raise Unreachable("timeout", f"Not done within {limits.total_seconds:g} s.") from None

    @asynccontextmanager
    async def _exchange(
        self,
        method: str,
        target: Target,
        *,
        headers: Mapping[str, str],
        body: bytes,
        limits: Caps,
        clock: Timings,
    ) -> AsyncIterator[Reply]:
        """One request on a connection of its own to the checked address."""
        route = _Pinned(target, limits, clock)
        connection = httpcore2.AsyncHTTPConnection(
            httpcore2.Origin(target.scheme.encode(), target.host.encode(), target.port),
            ssl_context=self._tls,
            network_backend=route,
        )
        request = httpcore2.Request(
            method,
            httpcore2.URL(
                scheme=target.scheme.encode(),
                host=target.host.encode(),
                port=target.port,
                target=target.path,
            ),
            headers=_head(target, {"user-agent": self._agent, **headers}, method, body),
            content=body,
            extensions={
                "timeout": {"connect": limits.connect_seconds, "write": limits.first_byte_seconds}
            },
        )
        with _translated():
            try:
                begun = _now()
                wait = limits.connect_seconds + limits.tls_seconds + limits.first_byte_seconds
                try:
                    async with asyncio.timeout(wait):
                        response = await connection.handle_async_request(request)
                except TimeoutError:
                    raise Unreachable("timeout", "The host did not answer in time.") from None
                clock.first_byte_ms = _since(begun)
                route.budget.open(limits.body_bytes)
                yield Reply(
                    url=target.url,
                    status=response.status,
                    headers={
                        name.decode("latin-1").lower(): value.decode("latin-1")
                        for name, value in response.headers
                    },
                    _response=response,
                    _limit=limits.body_bytes,
                )
            finally:
                # Never back into use: the rest of an answer that was not read goes with it.
                with suppress(Exception):
                    await connection.aclose()

    async def _resolve(self, host: str, port: int, seconds: float) -> tuple[Address, ...]:
        try:
            async with asyncio.timeout(seconds):
                found = list(await self._resolver(host, port))
        except TimeoutError:
            raise Unreachable("dns", "The name server did not answer in time.") from None
        except (OSError, UnicodeError):
            raise Unreachable("dns", "The host name cannot be looked up.") from None
        if not found:
            raise Unreachable("dns", "The host name has no address.")
        # A scope ("%eth0") is dropped: such an address is not allowed with or without it.
        return tuple(dict.fromkeys(ip_address(text.partition("%")[0]) for text in found))

    async def _getaddrinfo(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(row[4][0]) for row in rows]


@dataclass(slots=True)
class _Budget:
    """How many bytes may still be read from a connection: first for the head, then the body."""

    left: int
    what: str = "head"

    def open(self, body_bytes: int) -> None:
        # Framing of a chunked body and what was read with the head count a little against it.
        self.left, self.what = body_bytes + (body_bytes >> 1) + (64 << 10), "body"


@dataclass(slots=True)
class _Pinned(httpcore2.AsyncNetworkBackend):
    """Connects to the checked addresses of one target, and to nothing else."""

    target: Target
    limits: Caps
    clock: Timings
    budget: _Budget = field(init=False)

    def __post_init__(self) -> None:
        self.budget = _Budget(self.limits.header_bytes)

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        assert (host, port) == (self.target.host, self.target.port)
        begun = _now()
        problem: Exception = httpcore2.ConnectError("no address")
        for address in self.target.addresses[:_TRIES]:
            try:
                stream = await httpcore2.AnyIOBackend().connect_tcp(
                    str(address), port, timeout=timeout, socket_options=socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                problem = error
                continue
            peer = stream.get_extra_info("server_addr")
            if peer is None or ip_address(str(peer[0]).partition("%")[0]) != address:
                await stream.aclose()
                raise _refused("The connection led somewhere else.")
            self.clock.connect_ms, self.clock.address = _since(begun), str(address)
            return _Metered(stream, self)
        raise problem

    async def connect_unix_socket(self, *_: Any, **__: Any) -> httpcore2.AsyncNetworkStream:
        raise _refused("A socket of this machine is not an address.")

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class _Metered(httpcore2.AsyncNetworkStream):
    """A connection that stops reading when its budget is used up."""

    stream: httpcore2.AsyncNetworkStream
    route: _Pinned

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        budget = self.route.budget
        if budget.left <= 0:
            raise Unreachable("too_large", f"The answer's {budget.what} is too long.")
        data = await self.stream.read(min(max_bytes, budget.left), timeout)
        budget.left -= len(data)
        return data

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self.stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self.stream.aclose()

    async def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        begun = _now()
        try:
            stream = await self.stream.start_tls(
                ssl_context, server_hostname, self.route.limits.tls_seconds
            )
        except httpcore2.ConnectError as error:
            raise Unreachable("tls", f"No secure connection: {_reason(error)}.") from None
        self.route.clock.tls_ms = _since(begun)
        return _Metered(stream, self.route)

    def get_extra_info(self, info: str) -> Any:
        return self.stream.get_extra_info(info)


def _read(url: str) -> httpx2.URL:
    """The parts of an address, or a refusal. Nothing else in this module reads the text."""
    if len(url) > _MAX_URL:
        raise _refused(f"The address has more than {_MAX_URL} characters.")
    if any(ord(c) <= 0x20 or ord(c) == 0x7F or c == "\\" for c in url):
        raise _refused("The address holds spaces, control characters or backslashes.")
    try:
        parsed = httpx2.URL(url)
    except (httpx2.InvalidURL, ValueError):
        raise _refused("This is not an address.") from None
    host = parsed.raw_host.decode("ascii").lower()
    if parsed.scheme not in ("https", "http"):
        raise _refused("Use an https address.")
    if parsed.userinfo or "@" in parsed.netloc.decode("ascii"):
        raise _refused("The address carries a user name or password.")
    if parsed.port is not None and not 1 <= parsed.port <= 65535:
        raise _refused("The port is not a number from 1 to 65535.")
    if len(host) > _MAX_HOST or not (_literal(host) or _HOST.fullmatch(host.removesuffix("."))):
        raise _refused("The host is not a name.")
    if not _literal(host) and _NUMBER.fullmatch(host.removesuffix(".").rpartition(".")[2]):
        raise _refused("The host is an IP address in an unusual spelling.")
    return parsed


def _next_hop(
    method: str, target: Target, onward: str, headers: dict[str, str]
) -> tuple[str, dict[str, str]]:
    """Where a redirect leads, and with which headers."""
    if method not in ("GET", "HEAD"):
        raise Unreachable("protocol", "The address redirects a request that may not be repeated.")
    if any(ord(c) <= 0x20 or ord(c) > 0x7E for c in onward):
        raise _refused("The redirect leads to something that is not an address.")
    url = urljoin(target.url, onward)
    parsed = _read(url)
    if target.scheme == "https" and parsed.scheme != "https":
        raise _refused("The redirect leads from https to http.")
    before, after = httpx2.URL(target.url), parsed
    same = (before.scheme, before.raw_host, before.port) == (
        after.scheme,
        after.raw_host,
        after.port,
    )
    return url, headers if same else {}


def _head(
    target: Target, headers: Mapping[str, str], method: str, body: bytes
) -> list[tuple[bytes, bytes]]:
    """The headers as sent. Answers are asked for as they are: nothing is ever decompressed."""
    host = f"[{target.host}]" if ":" in target.host else target.host
    usual = target.port == (443 if target.scheme == "https" else 80)
    lines = {
        "host": host if usual else f"{host}:{target.port}",
        "accept": "*/*",
        "accept-encoding": "identity",
        "connection": "close",
        **headers,
    }
    if body or method not in ("GET", "HEAD"):
        lines["content-length"] = str(len(body))
    return [(name.encode("ascii"), value.encode("latin-1")) for name, value in lines.items()]


def _literal(host: str) -> Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def _forms(address: Address) -> tuple[Address, ...]:
    """The address, and each IPv4 address that is written inside it."""
    if isinstance(address, IPv4Address):
        return (address,)
    plain = IPv6Address(int(address))  # without a scope
    inner = IPv4Address(int(plain) & 0xFFFF_FFFF)
    if plain.ipv4_mapped is not None:
        return (inner,)  # the same address in another spelling
    if plain in _NAT64:
        return (plain, inner)
    if plain.sixtofour is not None:
        return (plain, plain.sixtofour)
    if plain.teredo is not None:
        return (plain, *plain.teredo)
    if (int(plain) >> 32) & 0xFDFF_FFFF == 0x0000_5EFE:  # ISATAP
        return (plain, inner)
    return (plain,)


def _public(address: Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _DENIED_V4)
    if address in _NAT64:
        return True  # what counts is the address inside, which is among the forms
    return address in _GLOBAL_V6 and not any(address in network for network in _DENIED_V6)


def _within(forms: Iterable[Address], networks: Iterable[Network]) -> bool:
    nets = tuple(networks)
    return any(f.version == network.version and f in network for f in forms for network in nets)


def _refused(detail: str) -> Failure:
    return Failure(Code.SOURCE_NOT_ALLOWED, detail)


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what the HTTP library raises into Unreachable."""
    try:
        yield
    except httpcore2.TimeoutException:
        raise Unreachable("timeout", "The host did not answer in time.") from None
    except httpcore2.ConnectError as error:
        raise Unreachable("connect", f"No connection: {_reason(error)}.") from None
    except httpcore2.NetworkError:
        raise Unreachable("connect", "The connection was cut.") from None
    except httpcore2.ProtocolError:
        raise Unreachable("protocol", "The answer is not valid HTTP.") from None


def _reason(error: BaseException) -> str:
    """One plain line of what the system said."""
    cause = error.__cause__ or error.__context__ or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        return cause.verify_message
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return re.sub(r"\s+", " ", str(cause))[:200] or type(cause).__name__


def _now() -> float:
    return asyncio.get_running_loop().time()


def _since(begun: float) -> float:
    return round((_now() - begun) * 1000, 3)
