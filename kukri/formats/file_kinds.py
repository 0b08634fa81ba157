"""What a file is by its first bytes, for files that are not what their names say."""

from __future__ import annotations

_KINDS = {
    b"version https://git-lfs": "a Git LFS pointer: fetch the real file with `git lfs pull`",
    b"PK\x03\x04": "a zip archive or PyTorch checkpoint",
    b"GGUF": "a GGUF file",
    b"lmgg": "a GGML file from before GGUF",
    b"fmgg": "a GGML file from before GGUF",
    b"tjgg": "a GGML file from before GGUF",
    b"FUGG": "a GGUF file with its bytes swapped",
    b"<!DO": "a web page",
    b"<!do": "a web page",
    b"<htm": "a web page",
    b"\x89HDF": "an HDF5 file",
}


def file_kind(head: bytes) -> str | None:
    """Return what a file is whose first 32 bytes these are; None if they do not tell."""
    kind = next((kind for magic, kind in _KINDS.items() if head.startswith(magic)), None)
    return "a safetensors file" if kind is None and head[8:9] == b"{" else kind
