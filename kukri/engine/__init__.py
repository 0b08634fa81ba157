"""The engine: requests in, tokens out, through a scheduler, a paged KV cache and a compiled model."""

from kukri.engine.engine import Engine, InFlight
from kukri.engine.loop import EngineLoop, EngineStatus
from kukri.engine.request import Request
from kukri.engine.request_maker import RequestMaker
from kukri.engine.scheduled_step import ScheduledChunk, StepOutput
from kukri.engine.sequence import RequestState
from kukri.engine.timings import Timings

__all__ = [
    "Engine",
    "EngineLoop",
    "EngineStatus",
    "InFlight",
    "Request",
    "RequestMaker",
    "RequestState",
    "ScheduledChunk",
    "StepOutput",
    "Timings",
]
