"""Attribution graphs, in the form of Neuronpedia's graph server: each is made by a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import time
from typing import Any, cast

import numpy as np
from starlette.requests import Request

from kukri import __version__
from kukri.errors import CapacityError, ConfigError, KukriError, RequestError
from kukri.host.hardware import available_bytes
from kukri.host.os_calls import allowed_cores
from kukri.interp.gradients.circuits import likeliest
from kukri.server.access import client_of
from kukri.server.answers.rows import request_options, rows_of
from kukri.server.errors import DeadlineError
from kukri.server.models.served_model import ServedModel
from kukri.server.neuronpedia.schema import GraphBody, GraphPromptBody, SalientBody
from kukri.server.worker_process import WorkerProcess

MOST_TOKENS = 256  # in a graph's prompt
_MAX_LINE = 1 << 29  # bytes of a graph
_MODEL_OPTIONS = ("quantize", "rope_scaling", "rope_factor", "max_context", "mmproj")  # that change the model


class Graphs:
    """Makes attribution graphs, one at a time, whatever their models are. Belongs to the event loop."""

    def __init__(self) -> None:
        self.is_busy = False
        self._progress: tuple[int, int] | None = None  # targets done, and in all

    def state(self) -> dict[str, Any]:
        """/check-busy: whether a graph is being made, and how much of it is."""
        if self._progress is None:
            return {"busy": self.is_busy}
        return {"busy": self.is_busy, "progress": dict(zip(("done", "total"), self._progress))}

    async def make(self, served: ServedModel, body: GraphBody, http: Request) -> bytes:
        """/generate-graph: the JSON of the graph. A caller that stops waiting ends the process that makes it.

        Raises RequestError, and CapacityError while another graph is made.
        """
        folder = folder_of(served, body.transcoder)
        if served.adapter_of(body.model_id) is not None:
            raise RequestError("attribution graphs are not supported with adapters", param="model_id")
        ids = await prompt_of(served, body)
        if len(ids) > MOST_TOKENS:
            raise RequestError.of(
                "prompt",
                f"must have at most {MOST_TOKENS} tokens, not {len(ids)}: use `kukri circuit` for longer "
                "ones",
            )
        if self.is_busy:
            raise CapacityError("another attribution graph is being made: try again later")
        self.is_busy = True
        try:
            http.scope["kukri.log"].update(n_prompt_tokens=len(ids))
            client_of(http.scope).meter.add(len(ids), 0)
            async with asyncio.timeout(served.settings.deadline_s):
                return await self._made(_job(served, body, ids, folder))
        except TimeoutError:
            raise DeadlineError(
                f"the graph was not finished within {served.settings.deadline_s:g} s"
            ) from None
        finally:
            self.is_busy, self._progress = False, None

    async def _made(self, job: dict[str, Any]) -> bytes:
        """The graph of a job. Raises RequestError and KukriError."""
        worker = await WorkerProcess.start("kukri.server.neuronpedia.graph_worker", _MAX_LINE)
        try:
            await worker.send(json.dumps(job).encode() + b"\n")
            outcome, message = "tracing", cast(Any, None)
            while outcome == "tracing":
                self._progress = message
                told = await worker.read_line() or b'["failed", "the process that makes the graph has ended"]'
                outcome, message = json.loads(told)
            if outcome == "made":
                return await worker.read_line()
        finally:
            await worker.kill()
        if outcome == "refused":
            raise RequestError(message)
        for path, what in ((job["transcoders"], "the transcoders"), (job["model"]["model"], "the model")):
            message = message.replace(path, what)  # no paths of this machine
        raise KukriError(message)


def transcoder_name(served: ServedModel, name: str | None) -> str:
    """The name, or that of the only transcoders. Raises RequestError."""
    there = served.session.catalog.transcoders
    if name is None and len(there) != 1:
        known = (
            f"choose one of {', '.join(there)}" if there else "start the server with --transcoder NAME=DIR"
        )
        raise RequestError.of("transcoder", f"is required: {known}")
    return next(iter(there)) if name is None else name


def folder_of(served: ServedModel, name: str | None) -> str:
    """The directory of the transcoders of this name, or of the only ones. Raises RequestError."""
    session, name = served.session, transcoder_name(served, name)
    try:
        session.catalog.known("transcoder", name).check(session.config.n_layers, session.config.d_model)
    except ConfigError as error:
        raise RequestError.of("transcoder", f"{name!r} cannot be used: {error}") from None
    folder = (served.llm.options.transcoders or {})[name]
    if not isinstance(folder, str | os.PathLike):
        raise RequestError.of("transcoder", f"{name!r} must be a directory, not an object")
    return os.fspath(folder)


async def prompt_of(served: ServedModel, body: GraphPromptBody) -> list[int]:
    """The token ids of a text, whose control tokens count, or of a chat before its answer."""
    limit = served.llm.engine.maker.max_context
    if body.messages is None:
        return await served.encode(body.prompt, parse_special=True, max_tokens=limit)
    messages = [{"role": one.role, "content": one.content} for one in body.messages]
    prompt = await served.prompts.before_answer(messages, max_tokens=limit)
    assert isinstance(prompt, list), "messages of text alone"
    return prompt


def _job(served: ServedModel, body: GraphBody, ids: list[int], folder: str) -> dict[str, Any]:
    """What `graph_worker.graph_of` makes."""
    options = served.llm.options
    settings = {"max_n_logits": body.max_n_logits, "desired_logit_prob": body.desired_logit_prob}
    thresholds = {"node_threshold": body.node_threshold, "edge_threshold": body.edge_threshold}
    generator = {"name": "kukri", "version": __version__}
    return {
        "model": {"model": str(served.llm.path), **{name: getattr(options, name) for name in _MODEL_OPTIONS}},
        "n_threads": max((options.n_threads or allowed_cores()) // 2, 1),  # BLAS waits busily for its threads
        "transcoders": folder,
        "ids": ids,
        "attributed": {
            "max_logits": body.max_n_logits,
            "logit_share": body.desired_logit_prob,
            "max_features": body.max_feature_nodes,
            "max_bytes": served.settings.max_graph_bytes or available_bytes() // 2,
        },
        "written": {"slug": body.slug_identifier, **thresholds},
        "metadata": {
            "prompt": body.prompt or served.tokenizer.decode(ids),
            "info": {"generator": generator, "create_time_ms": int(1000 * time.time())},
            "generation_settings": {**settings, "max_feature_nodes": body.max_feature_nodes},
            "pruning_settings": thresholds,
        },
    }


async def salient_logits(served: ServedModel, body: SalientBody, http: Request) -> dict[str, Any]:
    """/forward-pass: a prompt's tokens, and the likeliest next ones with their probabilities."""
    ids = await prompt_of(served, body)
    options = request_options(served, http.scope, body.model_id)
    request = served.llm.engine.maker.make_output_request(ids, "logits", first_row=len(ids) - 1, **options)
    ((logits,),) = await rows_of(served, [request], http.scope)
    tokens, shares = likeliest(logits, body.max_n_logits, body.desired_logit_prob)
    return {
        "prompt": body.prompt or served.tokenizer.decode(ids),
        "input_tokens": [served.tokenizer.decode([i], continues=True) for i in ids],
        "salient_logits": [
            {"token": served.tokenizer.decode([i], continues=True), "token_id": i, "probability": share}
            for i, share in zip(tokens.tolist(), shares.tolist())
        ],
        "total_salient_tokens": len(tokens),
        "cumulative_probability": float(np.sum(shares)),
    }
