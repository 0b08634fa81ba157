"""One request fails, or the engine: the others' answers and what clients are told."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from kukri import LLM
from tests.server.bodies import check_error, events
from tests.server.live_server import ASK, TEXT, serving


@pytest.mark.full
def test_a_failing_request_fails_alone(smollm2_path, caplog):
    """Catches one request's NaN that ends the engine or its neighbours, or leaves no trace in the log."""
    caplog.set_level(logging.ERROR, "kukri.server")
    with (
        LLM(smollm2_path, max_context=512, max_requests=4) as llm,
        serving(llm) as server,
        server.http() as http,
    ):
        engine = llm.engine
        make, victims = engine.maker.make_requests, []

        def make_with_a_fault(prompt, params, **options):
            if params.seed != 666:
                return make(prompt, params, **options)
            fault = nan_after(len(prompt) + 3)
            victims.extend(make(prompt, dataclasses.replace(params, logits_processors=[fault]), **options))
            return victims[-1:]

        engine.maker.make_requests = make_with_a_fault
        body = ASK[TEXT] | {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
        expected = http.post(TEXT, json=body).json()["choices"][0]["text"]
        with http.stream("POST", TEXT, json=body | {"stream": True}) as beside:
            failed = http.post(TEXT, json=body | {"seed": 666}, headers={"x-request-id": "the-bad-one"})
            check_error(failed, 500)
            chunks = list(events(beside))
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
        *chunks, last = events(http.post(TEXT, json=body | {"seed": 666, "stream": True}))
        assert 0 < len(chunks) <= 3  # drafts that are accepted share one
        received = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert expected.startswith(received)
        assert last["error"]["type"] == "server_error"
        assert len(victims) == 2
        assert any(getattr(record, "request_id", "") == "the-bad-one" for record in caplog.records)
        assert http.post(TEXT, json=body).json()["choices"][0]["text"] == expected
        server.wait_until(lambda: server.pages_used() == 0)


def nan_after(n_tokens):
    """A logits processor that leaves NaN once there are so many tokens."""

    def process(token_ids, row):
        if len(token_ids) >= n_tokens:
            row[:] = np.nan

    return process


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_health_and_requests_fail_when_the_engine_thread_has_ended(smollm2_path, monkeypatch):
    """Catches clients that wait forever, and a server that calls itself well."""
    with LLM(smollm2_path, max_context=512) as llm, serving(llm) as server, server.http() as http:
        assert http.get("/health").json() == {"status": "ok"}
        assert http.get("/ready").json() == {"status": "ready"}

        def die() -> None:
            raise SystemExit("the engine's thread ends here")

        monkeypatch.setattr(llm.engine, "step", die)
        logging.getLogger("kukri.engine").disabled = True
        try:
            check_error(http.post(TEXT, json=ASK[TEXT]), 500)
        finally:
            logging.getLogger("kukri.engine").disabled = False
        server.wait_until(lambda: http.get("/health").status_code == 503)
        assert http.get("/health").json() == {"status": "degraded"}
        assert http.get("/ready").status_code == 503
        check_error(http.post(TEXT, json=ASK[TEXT]), 503)
