"""Readings that wait for each other, by a clock of the test's own."""

from __future__ import annotations

from kukri.interp.interventions.read_limiter import ReadLimiter


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Request:
    pass


def reads(limiter, clock, requests, takes, until):
    """The share of the time that reading takes, and how often each request is read."""
    busy, counts = 0.0, [0] * len(requests)
    while clock.now < until:
        for i, request in enumerate(requests):
            if limiter.allows(request):
                since = limiter.now()
                clock.now += takes
                busy += takes
                counts[i] += 1
                limiter.took(request, since)
        clock.now += 0.001
    return busy / clock.now, counts


def test_large_readings_take_a_small_share_of_the_time():
    """Readings that take the processor from the engine, or of one request alone; small ones that wait."""
    clock = Clock()
    share, counts = reads(ReadLimiter(clock), clock, [Request() for _ in range(4)], 0.004, 20)
    assert 0.02 < share < 0.06
    assert max(counts) - min(counts) <= 1
    clock = Clock()
    _, counts = reads(ReadLimiter(clock), clock, [Request()], 0.0001, 1)
    assert counts[0] > 500
    # one that takes very long comes again after a second; requests that are gone do not count
    clock = Clock()
    limiter = ReadLimiter(clock)
    _, counts = reads(limiter, clock, [Request()], 0.5, 20)
    assert 12 <= counts[0] <= 14
    _, counts = reads(limiter, clock, [Request()], 0.004, clock.now + 2)
    assert counts[0] >= 18
    request = Request()
    limiter.took(request, clock.now - 0.5)
    assert not limiter.allows(request)
    limiter.forget(request)
    assert limiter.allows(request)
