"""Prompts of conversations with images: token ids of transformers' processors, places of images, mistakes."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken

from benchmarks.pictures import encoded, picture
from kukri.calls.image_prompts import MAX_IMAGES, ImagePrompts
from kukri.errors import RequestError
from kukri.tokenizer import ChatTemplate, load_tokenizer
from kukri.vision.image import ImagePrompt
from kukri.vision.processors import image_processor
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import byte_tokenizer

with lazy_imports():
    import transformers as tr
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

# as the checkpoints write them
SMOLVLM_TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}{% if message['content'][0]"
    "['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}{% for line in message['content'] %}{% if "
    "line['type'] == 'text' %}{{line['text']}}{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content']"
    " is string %}{{ message['content'] | trim }}{% else %}{% for item in message['content'] %}{% if "
    "item['type'] == 'image' %}<start_of_image>{% elif item['type'] == 'text' %}{{ item['text'] | trim }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>"
    "model\n{% endif %}"
)
TEXT_TEMPLATE = (  # which knows no images
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TILES = [f"<row_{r}_col_{c}>" for r in range(1, 7) for c in range(1, 7)]
MARKS = [
    "<image>", "<fake_token_around_image>", "<global-img>", *TILES, "<start_of_image>", "<end_of_image>",
    "<image_soft_token>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>",
]  # fmt: skip
SMALL = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
IDEFICS3 = image_processor(
    {"image_processor_type": "Idefics3ImageProcessor", **SMALL}, {"image_seq_len": 4}, {}
)
GEMMA3 = image_processor(
    {"image_processor_type": "Gemma3ImageProcessor", "size": 32}, {"image_seq_length": 6}, {}
)
QWEN = image_processor(
    {"image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 784, "max_pixels": 7840}, {}, {}
)
RED, TALL = picture(40, 50, 1), picture(90, 30, 2)


@pytest.fixture(scope="module")
def theirs():
    """transformers' tokenizer, with the tokens of all families."""
    made = byte_tokenizer()
    made.add_special_tokens(
        {"additional_special_tokens": [AddedToken(mark, normalized=False) for mark in MARKS]}
    )
    made.boi_token, made.eoi_token = "<start_of_image>", "<end_of_image>"
    made.image_token_id = made.convert_tokens_to_ids("<image_soft_token>")
    made.boi_token_id = made.convert_tokens_to_ids("<start_of_image>")
    made.image_token = "<image_soft_token>"
    return made


@pytest.fixture(scope="module")
def tokenizer(theirs, tmp_path_factory):
    """The same tokenizer, here."""
    from kukri.formats.huggingface.directory import tokenizer_files

    directory = tmp_path_factory.mktemp("tokenizer")
    theirs.save_pretrained(directory)
    return load_tokenizer(tokenizer_files(directory, {}, len(theirs)))


def prompt_of(tokenizer, processor, template, messages, **options):
    """The prompt of a conversation, and its images."""
    made = ChatTemplate(template, "<s>", "</s>")
    return ImagePrompts(tokenizer, processor).prompt(
        messages, lambda told, images: made.encode(tokenizer, told, images=images, **options)
    )


def user(*parts):
    """A message of texts and pictures."""
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}
        for part in parts
    ]
    return {"role": "user", "content": content}


SAID = {"role": "assistant", "content": [{"type": "text", "text": "Red."}]}
CONVERSATIONS = {
    "first": [user(RED, "What is it?")],
    "last": [user("What is this?", RED)],
    "two": [user(RED, "and", TALL, "?")],
    "side by side": [user(RED, TALL, "?")],
    "earlier": [user(RED, "What?"), SAID, user("And", TALL)],
    "text": [user("Hi")],
}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_are_those_of_idefics3(name, theirs, tokenizer):
    """Catches a token too many or too few around an image, and an image in the place of another."""
    messages = CONVERSATIONS[name]
    processor = tr.Idefics3Processor(
        Idefics3ImageProcessorPil(**SMALL), theirs, image_seq_len=4, chat_template=SMOLVLM_TEMPLATE
    )
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    images = [
        Image.fromarray(part["image"]) for one in messages for part in one["content"] if "image" in part
    ]
    expected = processor(text=text, images=images or None)
    found = prompt_of(tokenizer, IDEFICS3, SMOLVLM_TEMPLATE, messages)
    ids = found.token_ids if isinstance(found, ImagePrompt) else found
    assert list(ids) == list(np.asarray(expected["input_ids"]).reshape(-1))
    if images:
        pixels = np.concatenate([image.pixels for image in found.images])
        np.testing.assert_array_equal(pixels, expected["pixel_values"][0])
        places = [i for start, n, _ in found.spans for i in range(start, start + n)]
        image_id = theirs.convert_tokens_to_ids("<image>")
        assert places == [i for i, one in enumerate(ids) if one == image_id]


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_are_those_of_gemma3(name, theirs, tokenizer):
    """Catches the line ends around an image left out, and the placeholder expanded twice."""
    messages = CONVERSATIONS[name]
    processor = tr.Gemma3Processor(
        Gemma3ImageProcessorPil(size={"height": 32, "width": 32}), theirs, image_seq_length=6
    )
    text = theirs.apply_chat_template(
        messages, chat_template=GEMMA_TEMPLATE, tokenize=False, add_generation_prompt=True
    )
    images = [
        Image.fromarray(part["image"]) for one in messages for part in one["content"] if "image" in part
    ]
    expected = processor(text=[text], images=[images] if images else None, add_special_tokens=False)
    found = prompt_of(tokenizer, GEMMA3, GEMMA_TEMPLATE, messages)
    ids = found.token_ids if isinstance(found, ImagePrompt) else found
    assert list(ids) == list(np.asarray(expected["input_ids"]).reshape(-1))


@pytest.mark.full
def test_texts_are_those_of_qwen_and_others():
    """Catches a text around images that differs from transformers' own."""
    from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
    from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

    image = QWEN.prepare(RED)
    assert QWEN.text(image) == "<|image_pad|>" * (image.grid[1] * image.grid[2] // 4)
    pixtral = image_processor(
        {"image_processor_type": "PixtralImageProcessor"}, {"patch_size": 16, "spatial_merge_size": 2}, {}
    )
    image = pixtral.prepare(picture(200, 300))
    row = "[IMG]" * 10  # transformers imports its class with torchvision alone
    assert pixtral.text(image) == "[IMG_BREAK]".join([row] * 7) + "[IMG_END]"
    gemma4 = image_processor({"image_processor_type": "Gemma4ImageProcessor"}, {}, {})
    image = gemma4.prepare(RED)
    own = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
    counts = {"num_soft_tokens_per_image": [image.n_tokens]}
    assert gemma4.text(image) == Gemma4Processor.replace_image_token(own, counts, 0)
    lfm2 = image_processor({"image_processor_type": "Lfm2VlImageProcessorFast"}, {}, {})
    own = SimpleNamespace(
        image_start_token="<|image_start|>", image_end_token="<|image_end|>", image_token="<image>",
        image_thumbnail_token="<|img_thumbnail|>",
    )  # fmt: skip
    for sides in ((100, 200), (1600, 1200)):
        image = lfm2.prepare(picture(*sides))
        rows, columns, height, width = image.grid
        text = Lfm2VlProcessor._build_image_tokens(own, rows, columns, 256, height * width // 4, True, True)
        assert lfm2.text(image) == text


def test_placeholders_that_a_user_types_stay_text(tokenizer):
    """Catches a picture that somebody conjures up, or places where an image of another request stands."""
    typed = "<image> <fake_token_around_image><row_1_col_1> <image_soft_token><start_of_image>"
    for processor, template in (
        (IDEFICS3, SMOLVLM_TEMPLATE),
        (GEMMA3, GEMMA_TEMPLATE),
        (QWEN, TEXT_TEMPLATE),
    ):
        plain = prompt_of(tokenizer, processor, template, [user(typed, RED)])
        assert len(plain.images) == 1
        token = tokenizer.vocabulary.id_of[processor.token]
        n_tokens = sum(one == token for one in plain.token_ids)
        assert n_tokens == plain.images[0].n_tokens
        assert typed in tokenizer.decode(plain.token_ids)


def test_a_template_that_knows_no_images_gets_them_all_the_same(tokenizer):
    """Catches a picture lost because a file has the template of a text model, or in a tool's result."""
    found = prompt_of(tokenizer, QWEN, TEXT_TEMPLATE, [user("Look: ", RED)])
    text = tokenizer.decode(found.token_ids)
    n_tokens = found.images[0].n_tokens
    assert f"user\nLook: <|vision_start|>{'<|image_pad|>' * n_tokens}<|vision_end|><|im_end|>" in text
    result = {"role": "tool", "content": [{"type": "image", "image": RED}]}
    for template in (TEXT_TEMPLATE, GEMMA_TEMPLATE):
        processor = QWEN if template is TEXT_TEMPLATE else GEMMA3
        assert len(prompt_of(tokenizer, processor, template, [user("Look"), result]).images) == 1


def test_a_message_of_the_system_keeps_its_place(tokenizer):
    """Catches a template of parts alone that never shows what the system says."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    found = prompt_of(tokenizer, IDEFICS3, SMOLVLM_TEMPLATE, messages)
    assert (
        tokenizer.decode(found)
        == "<s><|im_start|>System: Be brief.<|im_end|>\nUser: Hi<|im_end|>\nAssistant:"
    )
    messages[1] = user(RED, "Hi")
    text = tokenizer.decode(prompt_of(tokenizer, IDEFICS3, SMOLVLM_TEMPLATE, messages).token_ids)
    assert text.startswith("<s><|im_start|>System: Be brief.<|im_end|>\nUser:<fake_token_around_image>")


def test_budgets_and_details_are_those_of_each_image(tokenizer):
    """Catches a wish that is lost in silence, and one that holds for the next image too."""
    large = picture(200, 260)
    part = {"type": "image", "image": large}
    found = prompt_of(
        tokenizer, QWEN, TEXT_TEMPLATE,
        [{"role": "user", "content": [part, {**part, "image_tokens": 5}, {**part, "detail": "low"}, part]}],
    )  # fmt: skip
    full, few, low, again = (image.n_tokens for image in found.images)
    assert few <= 5 < full
    assert full == again == low  # low is no less than this checkpoint's own bound
    for wrong in ({"detail": "huge"}, {"image_tokens": "5"}, {"image_tokens": 0}, {"image_tokens": True}):
        with pytest.raises(RequestError, match=r"messages\[0\]\.content\[0\]"):
            prompt_of(tokenizer, QWEN, TEXT_TEMPLATE, [{"role": "user", "content": [{**part, **wrong}]}])


@pytest.mark.full
def test_every_source_makes_the_same_prompt(tokenizer, tmp_path):
    """Catches a path, bytes or a data URL that is read in another way."""
    path = tmp_path / "a.png"
    path.write_bytes(encoded(RED))
    url = "data:image/png;base64," + base64.b64encode(encoded(RED)).decode()
    sources = [RED, encoded(RED), path, str(path), Image.fromarray(RED)]
    parts = [{"type": "image", "image": one} for one in sources]
    parts += [{"type": "image_url", "image_url": {"url": url}}, {"type": "image_url", "image_url": url}]
    digests = set()
    for part in parts:
        found = prompt_of(tokenizer, QWEN, TEXT_TEMPLATE, [{"role": "user", "content": [part]}])
        digests.add(found.images[0].digest)
    assert len(digests) == 1


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image"}, {"type": "image", "image": 5}, {"type": "image", "image": b"x"},
        {"type": "image_url", "image_url": "http://127.0.0.1/a.png"}, {"type": "image_url"},
        {"type": "image_url", "image_url": "file:///etc/passwd"},
    ],
)  # fmt: skip
def test_what_is_no_picture_is_named(part, tokenizer):
    """Catches a traceback, or a URL that Python's face opens."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    with pytest.raises(RequestError) as caught:
        prompt_of(tokenizer, QWEN, TEXT_TEMPLATE, messages)
    assert caught.value.param == "messages[0].content[1]"


def test_many_images_have_a_bound(tokenizer):
    """Catches a request that takes the memory of a thousand pictures."""
    tiny = picture(2, 2)
    found = prompt_of(tokenizer, GEMMA3, GEMMA_TEMPLATE, [user(*[tiny] * 50, "?")])
    assert len(found.images) == 50
    with pytest.raises(RequestError, match="at most 64"):
        prompt_of(tokenizer, GEMMA3, GEMMA_TEMPLATE, [user(*[tiny] * (MAX_IMAGES + 1))])


def test_a_model_of_text_alone_says_so(tokenizer):
    """Catches an answer about a picture that nobody has seen; earlier pictures become notes."""
    with pytest.raises(RequestError, match="the model reads and writes only text") as caught:
        prompt_of(tokenizer, None, TEXT_TEMPLATE, [user("a", RED)])
    assert caught.value.param == "messages[0].content[1]"
    found = prompt_of(tokenizer, None, TEXT_TEMPLATE, [user("a", RED), SAID, user("b")])
    assert "a\n[image]" in tokenizer.decode(found)
