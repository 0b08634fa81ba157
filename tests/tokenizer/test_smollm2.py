"""The real SmolLM2 file: ids, special tokens and chat template against transformers."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

from kukri.tokenizer import ChatTemplate, TextStream, Tokenizer
from tests.lazy_imports import lazy_imports
from tests.stopwatch import yardstick_s
from tests.tokenizer.hard_texts import HARD_TEXTS, any_text

with lazy_imports():
    from transformers import AutoTokenizer

CONVERSATION = [
    {"role": "user", "content": "What's the capital of France?"},
    {"role": "assistant", "content": "Paris.  "},
    {"role": "user", "content": "And of 日本? 👩‍👩‍👧\n"},
]


@pytest.fixture(scope="module")
def tokenizer(smollm2_path):
    return Tokenizer.from_gguf(smollm2_path)


@pytest.fixture(scope="module")
def reference(smollm2_path):
    loaded = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    # transformers forgets that SmolLM2's tokenizer.json takes digits one by one
    loaded.backend_tokenizer.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(False)])
    return loaded


def replaced(text):
    return re.sub("[\ud800-\udfff]", "\ufffd", text)


def test_ids_equal_transformers(tokenizer, reference):
    """Catches any difference in words, merges or special tokens on the model that users get first."""
    for text in HARD_TEXTS:
        expected = reference.encode(replaced(text), add_special_tokens=False)
        assert tokenizer.encode(text, parse_special=True) == expected, text
        assert tokenizer.decode(expected) == reference.decode(expected, clean_up_tokenization_spaces=False)
        assert tokenizer.decode(expected, skip_special=True) == reference.decode(
            expected, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@given(text=any_text)
def test_any_text_comes_back(tokenizer, reference, text):
    """Catches lost bytes; eight rare ones have no token and are dropped, as transformers does."""
    ids = tokenizer.encode(text)
    assert ids == reference.encode(replaced(text), add_special_tokens=False, split_special_tokens=True)
    if not re.search("[\x04\x06\x13\x14\x16\x1d\U00040000-\U000bffff]", text):
        assert tokenizer.decode(ids) == replaced(text)
    stream = TextStream(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.flush() == tokenizer.decode(ids)


def test_special_ids(tokenizer):
    """Catches generation that runs past <|im_end|>; the ids are llama.cpp's."""
    assert tokenizer.n_vocab == 49152
    assert (tokenizer.bos_id, tokenizer.bos_token, tokenizer.eos_token) == (1, "<|im_start|>", "<|im_end|>")
    assert tokenizer.eos_ids == {0, 2, 4}  # <|endoftext|>, <|im_end|>, <reponame>
    assert tokenizer.special_ids == set(range(17))
    assert not tokenizer.add_bos
    assert tokenizer.encode("Hi", add_special=True) == tokenizer.encode("Hi")


def test_chat_prompt_equals_transformers(tokenizer, reference):
    """Catches a prompt that differs by a newline from what the model was trained on."""
    chat = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)
    for messages in (CONVERSATION, [{"role": "system", "content": "Be brief."}, *CONVERSATION[:1]]):
        for add_generation_prompt in (False, True):
            ours = chat.render(messages, add_generation_prompt)
            options = {"add_generation_prompt": add_generation_prompt}
            assert ours == reference.apply_chat_template(messages, tokenize=False, **options)
            ids = reference.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
            assert chat.encode(tokenizer, messages, add_generation_prompt) == ids
            assert tokenizer.encode(ours, parse_special=True) == ids


@pytest.mark.full
def test_loads_in_some_tenth_of_a_second(smollm2_path):
    """Catches a slow way to build the vocabulary, which every start of the program would pay."""
    program = """
import sys, time
from kukri.formats.gguf.reader import GGUFFile
from kukri.tokenizer import Tokenizer
file, times = GGUFFile(sys.argv[1]), []
for _ in range(5):
    start = time.process_time()
    Tokenizer.from_gguf(file)
    times.append(time.process_time() - start)
print(min(times))
"""
    # a process of its own: the garbage collector would walk all of torch in this one
    run = subprocess.run(
        [sys.executable, "-c", program, smollm2_path], capture_output=True, text=True, check=True
    )
    # 108 to 123 were seen on an idle AMD EPYC, 170 on a busy one
    assert float(run.stdout) < 250 * min(yardstick_s() for _ in range(20))
