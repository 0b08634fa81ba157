"""The handlers of Ollama's routes about models: list, show, running, pull and delete."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from kukri.dataclass import dataclass, replace
from kukri.errors import KukriError, RequestError
from kukri.formats import hub
from kukri.formats.headers import read_headers
from kukri.formats.model_cache import remove
from kukri.formats.repos import parse_name
from kukri.quant.mixes import FILE_TYPES
from kukri.server.errors import ModelNotFoundError
from kukri.server.models.capabilities import stated_template
from kukri.server.models.entry import ModelEntry
from kukri.server.models.registry import ModelRegistry, registry_of
from kukri.server.ollama.schema import (
    NO_FILES,
    OPTIONS,
    OllamaBody,
    OllamaCopyBody,
    OllamaCreateBody,
    OllamaPullBody,
)
from kukri.server.preset import Preset
from kukri.server.sampling_fields import FACTS


@dataclass(frozen=True)
class ModelFacts:
    """The facts of a model's files that Ollama's API tells."""

    path: Path
    n_bytes: int
    modified_s: float
    details: dict[str, Any]
    info: dict[str, Any]
    template: str

    @property
    def digest(self) -> str:
        """An id of the files' state; no hash of their contents, which would be read whole for each list."""
        return sha256(f"{self.path}|{self.n_bytes}|{self.modified_s}".encode()).hexdigest()


def model_facts(entry: ModelEntry) -> ModelFacts | None:
    """The facts of a model, loaded or not; None if its files are not on this machine. Reads only headers."""
    try:
        path = entry.path
        headers = read_headers(path)
        modified_s = max(file.stat().st_mtime for file in headers.files)
    except (KukriError, OSError, ValueError):
        return None
    bytes_of: dict[str, int] = {}
    for tensor in headers.tensors:
        bytes_of[tensor.type] = bytes_of.get(tensor.type, 0) + tensor.n_bytes
    config, n_parameters = headers.config, headers.n_parameters
    mix = -1 if path.is_dir() else headers.stated.get("general.file_type", -1)
    most = max(bytes_of, key=lambda kind: bytes_of[kind], default="unknown")
    family = config.architecture if config is not None else "unknown"
    details = {
        "parent_model": "",
        "format": "safetensors" if headers.form == "safetensors" else "gguf",
        "family": family,
        "families": [family],
        "parameter_size": _size(n_parameters),
        "quantization_level": FILE_TYPES.get(mix, most),
    }
    info: dict[str, Any] = {"general.architecture": family, "general.parameter_count": n_parameters}
    if config is not None:
        sizes = {
            "context_length": config.max_context,
            "embedding_length": config.d_model,
            "block_count": config.n_layers,
            "feed_forward_length": config.d_ffn,
            "attention.head_count": config.n_heads,
            "attention.head_count_kv": config.n_kv_heads,
            "vocab_size": config.n_vocab,
        }
        info |= {f"{family}.{name}": value for name, value in sizes.items()}
    try:
        template = entry.spec.options.chat_template or stated_template(headers) or ""
    except KukriError:
        template = ""
    return ModelFacts(path, headers.file_bytes, modified_s, details, info, template)


async def ollama_tags(request: Request) -> Response:
    """Lists the models on this machine."""
    registry = registry_of(request)
    models = []
    for entry in await registry.catalog.listed(request.scope):
        facts = await asyncio.to_thread(model_facts, entry)
        if facts is not None:
            models += [_listed(name, facts) for name in entry.names]
    return JSONResponse({"models": models})


async def ollama_ps(request: Request) -> Response:
    """Lists the loaded models."""
    registry = registry_of(request)
    models = []
    for entry in await registry.catalog.listed(request.scope):
        facts = await asyncio.to_thread(model_facts, entry) if entry.served is not None else None
        if facts is None or entry.served is None:
            continue
        left_s = registry.expires_s(entry)
        forever = datetime.max.replace(tzinfo=UTC, microsecond=0) - timedelta(days=366)
        expires = forever if left_s is None else datetime.now(UTC) + timedelta(seconds=min(left_s, 1e9))
        memory = {"size": entry.n_bytes or facts.n_bytes, "size_vram": 0, "expires_at": _time(expires)}
        context = {"context_length": entry.served.llm.engine.maker.max_context}
        models.append({**_listed(entry.name, facts), **memory, **context})
    return JSONResponse({"models": models})


async def ollama_show(body: OllamaBody, request: Request) -> Response:
    """Describes a model."""
    registry = registry_of(request)
    entry = await registry.catalog.find(body.model, request.scope)
    facts = await asyncio.to_thread(model_facts, entry)
    if facts is None:
        raise ModelNotFoundError(body.model, [])
    preset = entry.preset(body.model)
    told = {"system": preset.system or "", "messages": [*preset.messages]} if preset is not None else {}
    return JSONResponse(
        {
            "modelfile": _modelfile(entry, preset),
            "parameters": _parameters(entry) if preset is None else _lines(preset.sampling),
            **told,
            "template": facts.template,
            "license": "",
            "details": facts.details,
            "model_info": facts.info,
            "capabilities": await asyncio.to_thread(entry.capabilities) or (),
            "modified_at": _time(datetime.fromtimestamp(facts.modified_s, UTC)),
        }
    )


async def ollama_pull(body: OllamaPullBody, request: Request) -> Response:
    """Fetches a model."""
    registry = registry_of(request)
    name = body.model.removesuffix(":latest")
    if not hub.is_known(name) and parse_name(name) is None:
        raise RequestError(f"the model {name[:100]!r} was not found: give org/repo:type", param="model")
    lines = _pulled(registry, name)
    if body.stream:
        return StreamingResponse(_encoded(lines), media_type="application/x-ndjson")
    last: dict[str, Any] = {}
    async for line in lines:
        last = line
    if "error" in last:
        raise KukriError(last["error"])
    return JSONResponse(last)


async def _encoded(lines: AsyncGenerator[dict[str, Any]]) -> AsyncGenerator[bytes]:
    async with aclosing(lines):
        async for line in lines:
            yield json.dumps(line).encode() + b"\n"


async def _pulled(registry: ModelRegistry, name: str) -> AsyncGenerator[dict[str, Any]]:
    """Fetches a model and tells how far that is; an error is the last line. Closed, it ends the download."""
    yield {"status": "pulling manifest"}
    status = {"status": f"pulling {name}", "digest": f"sha256:{sha256(name.encode()).hexdigest()}"}
    try:
        async with aclosing(registry.pulls.fetch(name)) as progress:
            async for n_done, n_bytes in progress:
                yield {**status, "completed": n_done, **({"total": n_bytes} if n_bytes else {})}
        await registry.catalog.add_cached(name)
    except KukriError as error:
        yield {"error": str(error)}
        return
    yield {"status": "verifying sha256 digest"}
    yield {"status": "success"}


async def ollama_delete(body: OllamaBody, request: Request) -> Response:
    """Removes a model."""
    registry = registry_of(request)
    entry = await registry.catalog.find(body.model, request.scope, exactly=True)
    if await registry.catalog.drop_preset(body.model):
        return Response(status_code=200)
    if not entry.is_cached:
        raise RequestError.of("model", f"cannot be {entry.name!r}: the server was started with it")
    await registry.delete(entry, partial(remove, entry.name))
    return Response(status_code=200)


async def ollama_create(body: OllamaCreateBody, request: Request) -> Response:
    """Creates a preset of a model that is served; one of that name is replaced."""
    registry = registry_of(request)
    entry = await registry.catalog.find(body.from_, request.scope, exactly=True)
    base = entry.preset(body.from_)
    preset = body.preset() if base is None else body.preset().over(base)
    await registry.catalog.add_preset(entry, preset)
    if not body.stream:
        return JSONResponse({"status": "success"})
    lines = ({"status": status} for status in ("writing manifest", "success"))
    return Response("".join(f"{json.dumps(line)}\n" for line in lines), media_type="application/x-ndjson")


async def no_blob(request: Request) -> Response:
    """Say that the file of a model is not here."""
    return Response(status_code=404)


async def refuse_blob(request: Request) -> Response:
    """Refuse the file of a model, unread: models come by /api/pull, or lie in the server's directory."""
    raise RequestError.of("files", f"is not supported: {NO_FILES}", code="unsupported_parameter")


async def ollama_copy(body: OllamaCopyBody, request: Request) -> Response:
    """Gives a model or a preset another name."""
    registry = registry_of(request)
    entry = await registry.catalog.find(body.source, request.scope, exactly=True)
    name = body.destination.removesuffix(":latest")
    base = entry.preset(body.source)
    await registry.catalog.add_preset(entry, Preset(name) if base is None else replace(base, name=name))
    return Response(status_code=200)


def _listed(name: str, facts: ModelFacts) -> dict[str, Any]:
    tagged = name if ":" in name else f"{name}:latest"
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": _time(datetime.fromtimestamp(facts.modified_s, UTC)),
        "size": facts.n_bytes,
        "digest": facts.digest,
        "details": facts.details,
    }


def _modelfile(entry: ModelEntry, preset: Preset | None) -> str:
    """The model, or what a preset adds to it, as a Modelfile."""
    lines = ["# served by kukri", f"FROM {entry.name}"]
    if preset is not None:
        lines += [f"PARAMETER {line}" for line in _lines(preset.sampling).splitlines()]
        lines += [f'SYSTEM """{preset.system}"""'] if preset.system else []
        lines += [f'MESSAGE {one["role"]} """{one["content"]}"""' for one in preset.messages]
    return "\n".join(lines) + "\n"


def _lines(sampling: Mapping[str, Any]) -> str:
    """Parameters that Ollama knows, a line each; each stop string has one."""
    found = []
    for name, value in sampling.items():
        values = value if isinstance(value, list | tuple) else [value]
        found += [f"{OPTIONS[name]:<30} {json.dumps(one)}" for one in values if name in OPTIONS]
    return "\n".join(found)


def _parameters(entry: ModelEntry) -> str:
    """The sampling defaults of a loaded model, a line each, as in a Modelfile."""
    if entry.served is None:
        return ""
    given: Mapping[str, Any] = vars(entry.served.llm.default_params)
    shown = {option: given[name] for name, option in OPTIONS.items() if FACTS[name].kind == "number"}
    return "\n".join(f"{option:<30} {value}" for option, value in shown.items())


def _size(n_parameters: int) -> str:
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n_parameters >= limit:
            return f"{n_parameters / limit:.2f}{unit}"
    return str(n_parameters)


def _time(when: datetime) -> str:
    return when.isoformat().replace("+00:00", "Z")
