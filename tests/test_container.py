"""The container images are built from the steps that CI runs without Docker (.ci/container)."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
STEPS = ROOT / "packaging" / "image.sh"
IMAGES = {name: (ROOT / "packaging" / name).read_text("utf-8") for name in ("Dockerfile", "Dockerfile.ray")}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_installs_by_the_steps_alone(image: str) -> None:
    """Catches a command in an image that nothing but Docker runs, and a step that the script lacks."""
    known = set(re.findall(r"^(\w+)\) #", STEPS.read_text("utf-8"), re.M))
    commands = re.findall(r"^RUN (.+)$", IMAGES[image], re.M)
    packages = [command for command in commands if command.startswith("apt-get ")]
    used = [re.fullmatch(r"/image\.sh (\w+)(?: [\w/,]+)*", one) for one in commands if one not in packages]
    assert [match and match[1] for match in used] == ["install", "user"]
    assert known == {"install", "user"}


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_copies_files_that_its_context_has(image: str) -> None:
    """Catches a file that was moved, or that .dockerignore keeps out."""
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text("utf-8").splitlines() if line[:1] == "!"}
    copied = re.findall(r"^COPY (?!--)(.+) \S+$", IMAGES[image], re.M)
    names = {name for line in copied for name in line.split()}
    assert names <= kept
    assert not [name for name in names if not (ROOT / name).exists()]


def test_an_unknown_step_is_refused() -> None:
    """Catches a misspelled step that builds an image without it."""
    done = subprocess.run([STEPS, "instal"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert "use install or user" in done.stderr
