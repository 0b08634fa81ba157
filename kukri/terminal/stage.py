"""`kukri stage`: some layers of a model, for an engine elsewhere."""

from __future__ import annotations

import os

from kukri.errors import ConfigError
from kukri.stages.greeting import listen
from kukri.stages.processes import MIN_TOKEN, TOKEN_VARIABLE, Address
from kukri.terminal.output import say


def run_stage(address: str, device: str | None, n_threads: int | None, *, once: bool) -> None:
    """Serves stages until it is ended; with `once` only one engine. Prints the address that it listens on.

    Raises ConfigError without a token, on an address that makes no sense or is taken.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").encode()
    if len(token) < MIN_TOKEN:
        raise ConfigError(
            f"{TOKEN_VARIABLE} is required here and for the engine: a random text of {MIN_TOKEN} "
            "characters or more"
        )
    host, _, port = address.rpartition(":")
    try:
        listener = listen(host.strip("[]") or "127.0.0.1", int(port))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{address!r} must be HOST:PORT of this machine: {error}") from None
    from kukri.opening.stage_model import read_stage_model
    from kukri.stages.server import StageOptions, serve_stage

    speed = 1.0
    if not once and device is None:  # else all stages are on one machine, or nothing is known
        from kukri.kernels.cpu.run.read_speed import measure_read_speed
        from kukri.stages.pipeline import SPEED_TEST

        speed = measure_read_speed(n_threads, *SPEED_TEST)
    bound = listener.getsockname()
    print(f"{Address(bound[0], bound[1])}", flush=True)
    if not once:
        say("waiting for an engine: kukri serve MODEL --stages HOST:PORT")
    with listener:
        own = StageOptions(device, n_threads, speed)
        serve_stage(listener, token, own, read_stage_model, once=once)
