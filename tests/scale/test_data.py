"""Models over the rows of data sets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import ConfigError
from kukri.scale.data import Predictor, predictor
from tests.tiny_gguf import tiny_config, write_tiny

SAMPLING = {"max_tokens": 12, "seed": 3}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def made(path: str, **options) -> Predictor:
    arguments = predictor(path, column="text", **options)
    return arguments["fn"](**arguments["fn_constructor_kwargs"])


def test_rows_are_answered_and_wrong_ones_say_why(path: str) -> None:
    """Catches a row that is too long and ends the whole job, or takes its neighbors' answers."""
    texts = np.array(["one", "x" * 1000, "two"], object)
    found = made(path, sampling=SAMPLING)({"id": np.arange(3), "text": texts})
    with LLM(path) as llm:
        wanted = [llm.generate(text, **SAMPLING).text for text in ("one", "two")]
    assert [found["answer"][0], found["answer"][2]] == wanted
    assert found["answer"][1] == ""
    assert "128" in found["answer_error"][1]
    assert found["answer_error"][0] == found["answer_error"][2] == ""
    assert found["id"].tolist() == [0, 1, 2]


def test_conversations_come_as_messages_or_as_json(path: str) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    rows = np.empty(2, object)
    rows[:] = [messages, json.dumps(messages)]
    found = made(path, task="chat", sampling=SAMPLING)({"text": rows})
    with LLM(path) as llm:
        assert found["answer"].tolist() == [llm.chat(messages, **SAMPLING).text] * 2
    assert set(found["answer_finish_reason"]) <= {"stop", "length"}


def test_embeddings_of_a_ray_dataset_are_the_llms(path: str) -> None:
    found = made(path, task="embed", output="vector")({"text": np.array(["a cat", "a dog"])})
    with LLM(path) as llm:
        assert np.array_equal(found["vector"], llm.embed(["a cat", "a dog"]))


def test_labels_of_a_ray_dataset_are_the_llms(tmp_path: Path) -> None:
    """Catches labels of another row, and a text that is too long and takes the others with it."""
    pytest.importorskip("torch")
    from tests.tasks.test_tasks import TEXTS, make

    make(tmp_path, "llama", TEXTS)
    texts = ["a good day", "x" * 1000, "a bad day"]
    predict = predictor(str(tmp_path), column="text", task="classify", output="label")
    found = predict["fn"](**predict["fn_constructor_kwargs"])({"text": np.array(texts, object)})
    with LLM(tmp_path) as llm:
        wanted = [llm.classify(text)[0] for text in (texts[0], texts[2])]
    assert [found["label"][0], found["label"][2]] == [one.label for one in wanted]
    assert [found["label_score"][0], found["label_score"][2]] == pytest.approx([one.score for one in wanted])
    assert found["label"][1] == ""
    assert "256" in found["label_error"][1]


@pytest.mark.parametrize("head", ["ForSequenceClassification", "Model"])
def test_scores_of_documents(head: str, tmp_path: Path) -> None:
    """Catches a score of another query or document, of cross-encoders and of embeddings."""
    pytest.importorskip("torch")
    from tests.models.tiny_encoders import save

    save(tmp_path, "bert", head, **({"num_labels": 1} if head != "Model" else {}))
    queries = ["cat?", "dog?", "cat?", "dog?", "cat?"]
    documents = ["the mat", "the mat", "cat " * 200, "a dog", "cats sat"]
    predict = predictor(str(tmp_path), column="text", query="query", task="rerank", output="score")
    made = predict["fn"](**predict["fn_constructor_kwargs"])
    found = made({"query": np.array(queries, object), "text": np.array(documents, object)})
    with LLM(tmp_path, n_threads=1) as llm:
        wanted = [
            np.nan if i == 2 else llm.rerank(query, [document])[0].score
            for i, (query, document) in enumerate(zip(queries, documents, strict=True))
        ]
    np.testing.assert_array_equal(found["score"], wanted)
    assert "96" in found["score_error"][2]
    assert [bool(error) for error in found["score_error"]] == [False, False, True, False, False]


def test_wrong_arguments() -> None:
    with pytest.raises(ConfigError, match="task must be one of"):
        predictor(column="text", task="dance")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="'query' is supported for the task rerank only"):
        predictor(column="text", task="rerank")
    with pytest.raises(ConfigError, match="'query' is supported for the task rerank only"):
        predictor(column="text", query="question")


@pytest.mark.ray
def test_a_data_set_loses_and_doubles_no_row(path: str, tmp_path: Path) -> None:
    """A data set of 60 rows over two actors, as Parquet in and out, in order."""
    ray = pytest.importorskip("ray")
    import pandas

    pandas.DataFrame({"id": range(60), "text": [f"row {i}" for i in range(60)]}).to_parquet(
        tmp_path / "in.parquet"
    )
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=200 << 20, log_to_driver=False)
    try:
        context = ray.data.DataContext.get_current()
        context.execution_options.preserve_order, context.enable_progress_bars = True, False
        rows = ray.data.read_parquet(str(tmp_path / "in.parquet"), override_num_blocks=4)
        found = rows.map_batches(
            **predictor(path, column="text", sampling=SAMPLING, concurrency=2, batch_size=8)
        )
        found.write_parquet(str(tmp_path / "out"))
        answers = pandas.read_parquet(tmp_path / "out")
    finally:
        ray.shutdown()
    assert sorted(answers["id"]) == list(range(60))
    with LLM(path) as llm:
        wanted = [one.text for one in llm.generate([f"row {i}" for i in range(60)], **SAMPLING)]
    assert answers.sort_values("id")["answer"].tolist() == wanted


JOB = """
import sys
import ray
from ray.data.checkpoint import CheckpointConfig
from kukri.scale.data import predictor

model, folder = sys.argv[1:]
# processors for readers, writers and the filter of rows that are done, beside those of the two actors
ray.init(address="local", num_cpus=6, include_dashboard=False, object_store_memory=200 << 20)
context = ray.data.DataContext.get_current()
context.enable_progress_bars = False
context.checkpoint_config = CheckpointConfig(
    "id", f"{folder}/checkpoint", delete_checkpoint_on_success=False
)
rows = ray.data.read_parquet(f"{folder}/in.parquet").repartition(target_num_rows_per_block=8)
sampling = {"max_tokens": 300, "ignore_eos": True, "seed": 3}
rows.map_batches(
    **predictor(model, column="text", sampling=sampling, concurrency=2, batch_size=8, max_context=512)
).write_parquet(f"{folder}/out")
"""


@pytest.mark.ray
def test_a_job_that_is_killed_continues(tmp_path: Path) -> None:
    """A job is killed with its Ray amid its rows, then run again: each row is in the output once."""
    pytest.importorskip("ray")
    import pandas

    from benchmarks.clusters import wait_for

    path = str(write_tiny(tmp_path / "tiny.gguf", tiny_config(max_context=512)))
    texts = [f"row {i}" for i in range(96)]
    rows = pandas.DataFrame({"id": [f"id-{i}" for i in range(96)], "text": texts})
    rows.to_parquet(tmp_path / "in.parquet")
    command = [sys.executable, "-c", JOB, path, str(tmp_path)]

    def committed() -> set[str]:
        files = (tmp_path / "checkpoint").glob("*.parquet")
        return {file.name for file in files if ".pending" not in file.name}

    run = subprocess.Popen(command)
    try:
        wait_for(lambda: len(committed()) >= 2 or run.poll() is not None, 240)
        assert run.poll() is None
    finally:
        run.kill()
        run.wait()
    before = committed()
    assert 2 <= len(before) < 12
    subprocess.run(command, check=True, timeout=240)
    assert before < committed()
    answers = pandas.read_parquet(tmp_path / "out")
    assert sorted(answers["id"]) == sorted(rows["id"])
    with LLM(path, max_context=512) as llm:
        found = llm.generate(texts, max_tokens=300, ignore_eos=True, seed=3)
    wanted = {f"id-{i}": one.text for i, one in enumerate(found)}
    assert dict(zip(answers["id"], answers["answer"], strict=True)) == wanted
