"""What travels between a front and a replica: parameters, errors, and a peer that does not read."""

from __future__ import annotations

import asyncio
import json

import pytest

from kukri.errors import CapacityError, ContextLengthError, KukriError, RequestError
from kukri.sampling import SamplingParams
from kukri.sampling.params import TokenSet
from kukri.scale import channel as channel_module
from kukri.scale.channel import Channel
from kukri.scale.wire import error_from_json, error_to_json, params_from_json, params_to_json


def test_breakers_that_are_sets_of_tokens_arrive_as_their_tokens() -> None:
    """Catches a set that JSON cannot hold, or that a replica takes for one sequence of tokens."""
    sent = SamplingParams(dry_multiplier=1, dry_sequence_breakers=[TokenSet([3, 1]), (5, 6)], seed=2**64 - 1)
    found = params_from_json(json.loads(json.dumps(params_to_json(sent))))
    assert found.dry_sequence_breakers == ((1,), (3,), (5, 6))
    assert (found.seed, found.dry_multiplier) == (2**64 - 1, 1.0)


@pytest.mark.parametrize(
    "error",
    [
        RequestError("too long", param="stop", code="invalid_value"),
        RequestError("wrong"),
        ContextLengthError(9, 8),
        CapacityError("no room"),
        KukriError("failed"),
    ],
    ids=repr,
)
def test_an_error_arrives_with_its_field(error: KukriError) -> None:
    """Catches an error of a replica that does not say which field is wrong, or becomes another status."""
    found = error_from_json(json.loads(json.dumps(error_to_json(error))))
    assert (str(found), vars(found).get("param"), vars(found).get("code")) == (
        str(error), vars(error).get("param"), vars(error).get("code"),
    )  # fmt: skip
    assert isinstance(error, type(found))


def test_a_peer_that_does_not_read_ends_the_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches messages that pile up in memory, without bound, for a peer that stands still."""
    monkeypatch.setattr(channel_module, "_MAX_UNSENT", 1 << 20)
    message = {"kind": "run", "text": "x" * (1 << 16)}

    async def main() -> tuple[int, bool, list[object]]:
        taken: asyncio.Queue[Channel] = asyncio.Queue()
        server = await asyncio.start_server(lambda *ends: taken.put_nowait(Channel(*ends)), "127.0.0.1", 0)
        sender = Channel(*await asyncio.open_connection(*server.sockets[0].getsockname()[:2]))
        reader, most = await taken.get(), 0
        first = [sender.send(message) or await reader.receive() for _ in range(100)]  # a peer that keeps up
        for _ in range(1000):
            sender.send(message)
            most = max(most, sender._writer.transport.get_write_buffer_size())
            await asyncio.sleep(0)
        has_ended = sender._writer.is_closing()
        reader.close()
        server.close()
        return most, has_ended, first

    most, has_ended, first = asyncio.run(main())
    assert first == [message] * 100
    assert has_ended
    assert 1 << 20 < most < 2 << 20
