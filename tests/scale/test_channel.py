"""How a front and a replica meet."""

import asyncio

import pytest

from kukri.scale.channel import Channel
from kukri.stages.greeting import HELLO_BYTES


def meet(secret: str, others: str, spoken: bytes = b"") -> tuple[bool, object]:
    """What a front with a secret makes of a replica with another one, and the error of the replica, if any.

    With `spoken` the peer is a stranger that says this.
    """

    async def run() -> tuple[bool, object]:
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        async def front(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            channel = Channel(reader, writer)
            admitted.set_result(await channel.admits(secret))
            channel.close()

        async with await asyncio.start_server(front, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()[:2]
            error: object = None
            try:
                if spoken:
                    reader, writer = await asyncio.open_connection(host, port)
                    writer.write(spoken)
                    writer.write_eof()
                    assert len(await reader.read()) == HELLO_BYTES, "and nothing that proves anything"
                    writer.close()
                else:
                    (await Channel.connected(host, port, others)).close()
            except (OSError, ValueError) as raised:
                error = raised
            return await admitted, error

    return asyncio.run(asyncio.wait_for(run(), 20))


def test_only_those_that_know_the_secret_meet():
    """Catches a replica that anybody can be, and a front that anybody can be."""
    assert meet("a" * 64, "a" * 64) == (True, None)
    is_admitted, error = meet("a" * 64, "b" * 64)
    assert not is_admitted
    assert isinstance(error, OSError | ValueError)


@pytest.mark.parametrize("spoken", [b"x", b"R" + bytes(64), b'{"kind": "hello"}' * 10])
def test_strangers_are_told_nothing(spoken):
    """Catches a proof for a peer that has given none, and a wait for more than a proof."""
    assert meet("a" * 64, "", spoken) == (False, None)


def test_a_front_that_does_not_know_the_secret_is_left():
    """Catches a secret or a request that is sent to whoever listens."""

    async def run() -> bytes:
        heard = bytearray()

        async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"kukri stage 2\n" + bytes(32))
            heard.extend(await reader.readexactly(65))
            writer.write(bytes(32))
            heard.extend(await reader.read())
            writer.close()

        async with await asyncio.start_server(stranger, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()[:2]
            with pytest.raises(ValueError, match="does not know the token"):
                await Channel.connected(host, port, "s3cret" * 9)
        return bytes(heard)

    heard = asyncio.run(asyncio.wait_for(run(), 20))
    assert len(heard) == 65
    assert b"s3cret" not in heard
