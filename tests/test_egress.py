"""The guarded way out: hostile addresses, changing names, slow and endless answers."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import ip_address, ip_network
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mediamill import config
from mediamill.egress import Caps, Egress, Policy, Timings, Unreachable
from mediamill.failures import Code, Failure

pytestmark = pytest.mark.anyio

LOCAL = (ip_network("127.0.0.0/8"), ip_network("::1/128"))
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class Listener:
    """A server on both loopback addresses that counts who comes."""

    port: int = 0
    connections: int = 0
    requests: list[bytes] = field(default_factory=list)


@asynccontextmanager
async def listening(answer: Answer | None = None) -> AsyncIterator[Listener]:
    seen = Listener()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length:")
                ),
                0,
            )
            seen.requests.append(head + await reader.readexactly(length))
            if answer:
                await answer(reader, writer)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    first = await asyncio.start_server(serve, "127.0.0.1", 0)
    seen.port = first.sockets[0].getsockname()[1]
    servers = [first]
    try:
        servers.append(await asyncio.start_server(serve, "::1", seen.port))
    except OSError:  # no IPv6 on this machine, or the port is taken there
        pass
    try:
        yield seen
    finally:
        for server in servers:
            server.close()


def saying(raw: bytes) -> Answer:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)

    return answer


def naming(*answers: Iterable[str]) -> Callable[[str, int], Awaitable[Iterable[str]]]:
    """A name server that gives these answers in turn, the last one for ever."""
    left = list(answers)

    async def resolve(host: str, port: int) -> Iterable[str]:
        return left.pop(0) if len(left) > 1 else left[0]

    return resolve


def opened(**more: Any) -> Egress:
    """A way out that may call this machine."""
    return Egress(Policy(allow_networks=LOCAL), **more)


HOSTILE = [
    "http://127.0.0.1:{port}/",
    "http://127.1:{port}/",
    "http://127.0.1:{port}/",
    "http://2130706433:{port}/",
    "http://0x7f000001:{port}/",
    "http://0x7f.0.0.1:{port}/",
    "http://0177.0.0.1:{port}/",
    "http://0177.0.0.01:{port}/",
    "http://017700000001:{port}/",
    "http://127.0.0.1.:{port}/",
    "http://0.0.0.0:{port}/",
    "http://0:{port}/",
    "http://127.127.127.127:{port}/",
    "http://localhost:{port}/",
    "http://LOCALHOST:{port}/",
    "http://localhost.:{port}/",
    "http://LocalHost%2e:{port}/",
    "http://%31%32%37.0.0.1:{port}/",
    "http://127。0。0。1:{port}/",
    "http://①②⑦.⓪.⓪.①:{port}/",
    "http://１２７.0.0.1:{port}/",
    "http://ⓛocalhost:{port}/",
    "http://[::1]:{port}/",
    "http://[0:0:0:0:0:0:0:1]:{port}/",
    "http://[0000::0001]:{port}/",
    "http://[::]:{port}/",
    "http://[::ffff:127.0.0.1]:{port}/",
    "http://[::ffff:7f00:1]:{port}/",
    "http://[::127.0.0.1]:{port}/",
    "http://[64:ff9b::127.0.0.1]:{port}/",
    "http://[64:ff9b:1::127.0.0.1]:{port}/",
    "http://[2002:7f00:1::]:{port}/",
    "http://[2001:0:7f00:1::]:{port}/",
    "http://[fe80::1%25lo]:{port}/",
    "http://[::1%25lo]:{port}/",
    "http://public.example@127.0.0.1:{port}/",
    "http://user:secret@localhost:{port}/",
    "http://public.example#@127.0.0.1:{port}/",
    "http://public.example\\@127.0.0.1:{port}/",
    "http://127.0.0.1:{port}\\@public.example/",
    "http:\\\\127.0.0.1:{port}\\",
    "http:127.0.0.1:{port}/",
    "//127.0.0.1:{port}/",
    "\thttp://127.0.0.1:{port}/",
    "http://127.0.0.1\n:{port}/",
    "http://127.0.0.1%00.public.example:{port}/",
    "http://127.0.0.1\u200b:{port}/",
    "http://local\u00adhost:{port}/",
    "gopher://127.0.0.1:{port}/",
    "file:///etc/passwd",
    "ftp://127.0.0.1:{port}/",
    "ws://127.0.0.1:{port}/",
    "unix:///run/postgresql",
    "http://",
    "http://:{port}/",
    "http://127.0.0.1:99999/",
    "http://169.254.169.254/latest/meta-data/",
    "http://[::ffff:a9fe:a9fe]/",
    "http://[fd00:ec2::254]/",
    "http://168.63.129.16/",
    "http://100.100.100.200/",
    "http://192.0.0.192/",
]


async def test_no_hostile_spelling_makes_a_connection() -> None:
    async with listening() as seen:
        way = Egress(Policy(allow_http=True, ports=frozenset({80, 443, seen.port})))
        for spelling in HOSTILE:
            url = spelling.format(port=seen.port)
            with pytest.raises(Failure) as caught:
                async with way.call("GET", url):
                    pass
            assert caught.value.code in (Code.SOURCE_NOT_ALLOWED, Code.TARGET_UNREACHABLE), url
            if caught.value.code is Code.TARGET_UNREACHABLE:
                assert isinstance(caught.value, Unreachable)
                assert caught.value.kind == "dns", url
        way.close()
        assert seen.connections == 0


async def test_the_listener_would_have_counted_them() -> None:
    async with listening() as seen:
        way = opened()
        async with way.call("GET", f"http://localhost:{seen.port}/") as reply:
            assert (reply.status, await reply.read()) == (200, b"hello")
        way.close()
        assert seen.connections == 1


async def test_a_name_that_changes_its_mind_is_connected_to_where_it_was_checked() -> None:
    async with listening() as seen:
        way = Egress(
            Policy(allow_http=True, ports=frozenset({seen.port})),
            resolver=naming(["8.8.8.8"], ["127.0.0.1"]),
        )
        target = await way.check(f"http://rebind.example:{seen.port}/")
        assert [str(a) for a in target.addresses] == ["8.8.8.8"]
        with pytest.raises(Failure) as caught:  # the next look-up says 127.0.0.1
            async with way.call("GET", f"http://rebind.example:{seen.port}/"):
                pass
        assert caught.value.code is Code.SOURCE_NOT_ALLOWED
        asked: list[str] = []

        async def twice(host: str, port: int) -> Iterable[str]:
            asked.append(host)
            return ["8.8.8.8"] if len(asked) == 1 else ["127.0.0.1"]

        way = Egress(Policy(allow_http=True, ports=frozenset({seen.port})), resolver=twice)
        with pytest.raises(Unreachable):
            async with way.call(
                "GET", f"http://rebind.example:{seen.port}/", caps=Caps(connect_seconds=0.2)
            ):
                pass
        assert asked == ["rebind.example"]  # one look-up for check and connection
        assert seen.connections == 0


@pytest.mark.parametrize(
    "answers",
    [
        ["8.8.8.8", "127.0.0.1"],
        ["2606:4700::1111", "::1"],
        ["::ffff:10.0.0.1"],
        ["64:ff9b::a00:1"],
        ["fe80::1%eth0"],
        ["168.63.129.16"],
    ],
)
async def test_one_closed_answer_of_a_name_closes_it(answers: list[str]) -> None:
    way = Egress(Policy(), resolver=naming(answers))
    with pytest.raises(Failure) as caught:
        await way.check("https://mixed.example/")
    assert caught.value.code is Code.SOURCE_NOT_ALLOWED


async def test_public_names_pass_with_their_usual_ports_only() -> None:
    way = Egress(
        Policy(), resolver=naming(["93.184.215.14", "2606:4700::1111", "64:ff9b::808:808"])
    )
    target = await way.check("https://Hooks.Example.com/in?x=1#frag")
    assert (target.host, target.port, target.path) == ("hooks.example.com", 443, b"/in?x=1")
    assert target.origin == "https://hooks.example.com:443"
    assert len(target.addresses) == 3
    await way.check("https://hooks.example.com:8443/")
    await way.check("https://bücher.example/")
    for url in ("http://hooks.example.com/", "https://hooks.example.com:22/", "https://8.8.8.8/"):
        with pytest.raises(Failure) as caught:
            await way.check(url)
        assert caught.value.code is Code.SOURCE_NOT_ALLOWED
    for url in ("https://h.example/" + "x" * 2048, "https://" + "a." * 130 + "example/"):
        with pytest.raises(Failure):
            await way.check(url)


async def test_a_name_without_addresses_is_unreachable_and_not_closed() -> None:
    async def nothing(host: str, port: int) -> Iterable[str]:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    async def silent(host: str, port: int) -> Iterable[str]:
        await asyncio.sleep(60)
        return []

    for resolver in (nothing, silent, naming([])):
        with pytest.raises(Unreachable) as caught:
            await Egress(Policy(), resolver=resolver).check("https://gone.example/", seconds=0.1)
        assert caught.value.kind == "dns"


def test_an_operator_opens_networks_and_never_the_metadata_addresses() -> None:
    policy = Policy(
        allow_networks=(ip_network("10.0.0.0/8"), ip_network("169.254.0.0/16"), ip_network("::/0")),
        deny_networks=(ip_network("10.9.0.0/16"), ip_network("8.8.8.0/24")),
    )
    assert policy.allows(ip_address("10.1.2.3"))
    assert policy.allows(ip_address("::ffff:10.1.2.3"))
    assert policy.allows(ip_address("fd12::1"))
    for closed in (
        "10.9.0.1",
        "8.8.8.8",
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "192.168.1.1",
    ):
        assert not policy.allows(ip_address(closed)), closed
    for closed in (
        "64:ff9b::a9fe:a9fe",
        "2002:a9fe:a9fe::1",
        "fd00:ec2::254",
        "fe80::5efe:10.9.0.1",
    ):
        assert not policy.allows(ip_address(closed)), closed


@given(st.ip_addresses(v=4))
def test_an_address_is_closed_in_every_ipv6_spelling_of_it(address: Any) -> None:
    policy, number = Policy(), int(address)
    spellings = {
        "mapped": ip_address((0xFFFF << 32) | number).__class__(f"::ffff:{address}"),
        "nat64": ip_address(f"64:ff9b::{address}"),
    }
    for name, spelled in spellings.items():
        assert policy.allows(spelled) == policy.allows(address), name
    for text in (f"::{address}", f"64:ff9b:1::{address}", f"fe80::5efe:{address}"):
        assert not policy.allows(ip_address(text))
    assert not policy.allows(ip_address((0x2002 << 112) | (number << 80) | 1))
    if policy.allows(address):
        assert address.is_global
        assert not address.is_multicast


@given(st.ip_addresses(v=6))
def test_only_global_unicast_is_open(address: Any) -> None:
    if Policy().allows(address) and address.ipv4_mapped is None:
        assert address.is_global
        assert str(address).startswith(("2", "3", "64:ff9b::"))


async def test_a_redirect_is_the_answer_unless_the_caller_follows() -> None:
    async with listening() as inner:
        raw = f"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:{inner.port}/\r\n\r\n"
        async with listening(saying(raw.encode())) as outer:
            way = opened()
            async with way.call("POST", f"http://localhost:{outer.port}/", body=b"x") as reply:
                assert reply.status == 302
            assert inner.connections == 0
            async with way.call(
                "GET",
                f"http://localhost:{outer.port}/",
                headers={"authorization": "Bearer secret"},
                caps=Caps(redirects=2),
            ) as reply:
                assert (reply.status, reply.url) == (200, f"http://127.0.0.1:{inner.port}/")
            assert b"authorization" in outer.requests[-1]
            assert b"secret" not in inner.requests[-1]
            with pytest.raises(Unreachable):
                async with way.call(
                    "POST", f"http://localhost:{outer.port}/", caps=Caps(redirects=2)
                ):
                    pass


@pytest.mark.parametrize(
    "onward", ["http://10.0.0.1/", "http://169.254.169.254/", "//0.0.0.0/", "file:///etc/passwd"]
)
async def test_each_hop_is_checked_anew(onward: str) -> None:
    raw = f"HTTP/1.1 307 Go\r\nlocation: {onward}\r\n\r\n"
    async with listening(saying(raw.encode())) as outer:
        with pytest.raises(Failure) as caught:
            async with opened().call(
                "GET", f"http://localhost:{outer.port}/", caps=Caps(redirects=5)
            ):
                pass
        assert caught.value.code is Code.SOURCE_NOT_ALLOWED


async def test_a_circle_of_redirects_ends() -> None:
    async with listening(saying(b"HTTP/1.1 301 Go\r\nlocation: /again\r\n\r\n")) as outer:
        with pytest.raises(Unreachable):
            async with opened().call(
                "GET", f"http://localhost:{outer.port}/", caps=Caps(redirects=3)
            ):
                pass
        assert outer.connections == 4


async def dripping(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x-a: b\r\n")
        await writer.drain()
        await asyncio.sleep(0.02)


async def slow_body(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.02)


async def endless_body(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def endless_head(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n")
    while True:
        writer.write(b"x-a: " + b"b" * 1000 + b"\r\n")
        await writer.drain()


async def endless_informing(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"HTTP/1.1 103 Early Hints\r\n\r\n")
        await writer.drain()


async def never(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (dripping, "timeout"),
        (slow_body, "timeout"),
        (never, "timeout"),
        (endless_body, "too_large"),
        (endless_head, "too_large"),
        (endless_informing, "too_large"),
        (saying(b"HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\nshort"), "protocol"),
        (saying(b"\x00\x01\x02 nonsense\r\n\r\n"), "protocol"),
        (saying(b""), "protocol"),
        (saying(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nZZ\r\n"), "protocol"),
    ],
)
async def test_a_hostile_answer_costs_little_and_ends(answer: Answer, kind: str) -> None:
    caps = Caps(total_seconds=0.6, first_byte_seconds=0.6)
    async with listening(answer) as seen:
        with pytest.raises(Unreachable) as caught:
            async with opened().call("GET", f"http://localhost:{seen.port}/", caps=caps) as reply:
                await reply.read()
        assert caught.value.kind == kind


async def test_an_excerpt_reads_no_more_than_it_needs_and_nothing_is_unpacked() -> None:
    async with (
        listening(endless_body) as seen,
        opened().call("GET", f"http://localhost:{seen.port}/") as reply,
    ):
        assert len(await reply.excerpt(4096)) == 4096
    packed = b"\x1f\x8b\x08\x00" + b"\x00" * 20
    head = f"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: {len(packed)}\r\n\r\n"
    async with listening(saying(head.encode() + packed)) as seen:
        async with opened().call("GET", f"http://localhost:{seen.port}/") as reply:
            assert await reply.read() == packed
        assert b"accept-encoding: identity" in seen.requests[0]


async def test_the_request_goes_out_as_given_and_past_any_proxy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    timings = Timings()
    async with listening() as seen:
        async with opened(agent="Mediamill/9").call(
            "POST",
            f"http://localhost:{seen.port}/in%20box?a=b",
            headers={"Content-Type": "application/json", "webhook-id": "evt_1"},
            body='{"a": "ü"}'.encode(),
            timings=timings,
        ) as reply:
            assert reply.status == 200
        head, _, body = seen.requests[0].partition(b"\r\n\r\n")
    lines = head.split(b"\r\n")
    assert lines[0] == b"POST /in%20box?a=b HTTP/1.1"
    assert f"host: localhost:{seen.port}".encode() in lines
    assert b"content-length: 11" in lines
    assert b"user-agent: Mediamill/9" in lines
    assert b"webhook-id: evt_1" in lines
    assert body == '{"a": "ü"}'.encode()
    assert timings.address in ("127.0.0.1", "::1")
    assert None not in (timings.dns_ms, timings.connect_ms, timings.first_byte_ms)


async def test_a_refused_connection_and_a_wrong_certificate_are_told_apart() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    way = Egress(Policy(allow_networks=LOCAL), resolver=naming(["127.0.0.1"]))
    with pytest.raises(Unreachable) as caught:
        async with way.call("GET", f"http://here.example:{port}/"):
            pass
    assert caught.value.kind == "connect"

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 no TLS here\r\n")
        writer.close()

    async with await asyncio.start_server(speak, "127.0.0.1", 0) as plain:
        port = plain.sockets[0].getsockname()[1]
        with pytest.raises(Unreachable) as caught:
            async with way.call("GET", f"https://here.example:{port}/"):
                pass
    assert caught.value.kind == "tls"


def test_the_policy_comes_from_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDIAMILL_EGRESS_ALLOW_NETWORKS", '["10.0.0.0/8"]')
    monkeypatch.setenv("MEDIAMILL_EGRESS_PORTS", "[443]")
    policy = Policy.of(config.load())
    assert policy.allow_networks == (ip_network("10.0.0.0/8"),)
    assert policy.ports == {443}
    assert not policy.allow_http
    monkeypatch.setenv("MEDIAMILL_EGRESS_ALLOW_NETWORKS", '["10.0.0.1/8"]')
    with pytest.raises(config.ConfigError, match="egress_allow_networks"):
        config.load()
    monkeypatch.setenv("MEDIAMILL_EGRESS_ALLOW_NETWORKS", "10.0.0.0/8")
    with pytest.raises(config.ConfigError, match=r"egress_allow_networks.*JSON"):
        config.load()


def test_certificates_are_always_checked() -> None:
    context = Egress(Policy())._tls
    assert context.verify_mode is ssl.CERT_REQUIRED
    assert context.check_hostname
