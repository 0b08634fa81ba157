"""Text to token ids and back, chat templates, and text that grows token by token."""

from kukri.tokenizer.chat import ChatTemplate
from kukri.tokenizer.fill_in_middle import FillInMiddle
from kukri.tokenizer.huggingface_reader import load_tokenizer
from kukri.tokenizer.messages import arguments_object, newest_turn, note
from kukri.tokenizer.stream import StopStrings, TextStream, n_partial
from kukri.tokenizer.tokenizer import Tokenizer

__all__ = [
    "ChatTemplate",
    "FillInMiddle",
    "StopStrings",
    "TextStream",
    "Tokenizer",
    "arguments_object",
    "load_tokenizer",
    "n_partial",
    "newest_turn",
    "note",
]
