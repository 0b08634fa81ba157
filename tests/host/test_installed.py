"""How to install what kukri lacks, for each way in which kukri can have been installed."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kukri.host import installed
from kukri.host.installed import install_command

REQUIRES = """Requires-Dist: numpy>=2.2
Requires-Dist: llguidance>=1.9.1; extra == 'grammar'
Requires-Dist: llguidance>=1.9.1; extra == 'serve'
Requires-Dist: fastapi>=0.115; extra == "serve"
Requires-Dist: uvloop>=0.21; (sys_platform != 'win32') and extra == 'serve'
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that pretends an installation: its origin, as pip records it, and more metadata."""

    def install(origin: dict[str, Any] | None, more: str = "") -> None:
        folder = tmp_path / "kukri-0.1.0.dist-info"
        folder.mkdir(exist_ok=True)
        head = "Metadata-Version: 2.4\nName: kukri\nVersion: 0.1.0\n"
        (folder / "METADATA").write_text(head + more + REQUIRES, "utf-8")
        if origin is not None:
            (folder / "direct_url.json").write_text(json.dumps(origin), "utf-8")
        monkeypatch.setattr(metadata, "distribution", lambda name: metadata.PathDistribution(folder))

    return install


def test_from_a_directory(site: Any, tmp_path: Path) -> None:
    """Catches a remedy that takes an editable installation away, and a path that is a URL."""
    folder = tmp_path / "my kukri"
    folder.mkdir()
    site({"url": folder.as_uri(), "dir_info": {"editable": True}})
    assert install_command("serve", "ray") == f'pip install -e "{folder}[serve,ray]"'
    site({"url": folder.as_uri(), "dir_info": {}})
    assert install_command("serve") == f'pip install "{folder}[serve]"'


def test_from_a_wheel_or_a_repository(site: Any, tmp_path: Path) -> None:
    """Catches a wheel that is gone, and a commit that is forgotten."""
    wheel = tmp_path / "kukri-0.1.0-py3-none-any.whl"
    site({"url": wheel.as_uri(), "archive_info": {}})
    packages = 'pip install "llguidance>=1.9.1" "fastapi>=0.115" "uvloop>=0.21"'
    assert install_command("serve", "grammar") == packages  # the wheel was a file that is gone
    wheel.touch()
    assert install_command("serve") == f'pip install "{wheel}[serve]"'
    site({"url": "https://host.invalid/k.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}})
    assert install_command("serve") == 'pip install "kukri[serve] @ git+https://host.invalid/k.git@abc"'


def test_the_index_is_named_by_releases_alone(site: Any) -> None:
    """Catches advice to run the code of whoever took kukri's name on an index before kukri did."""
    site(None)
    assert install_command("grammar") == 'pip install "llguidance>=1.9.1"'
    site(None, "Project-URL: Source, https://host.invalid\n")
    assert install_command("grammar") == 'pip install "kukri[grammar]"'


def test_without_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error in an error, where kukri is a folder on Python's path."""
    monkeypatch.setattr(installed, "DISTRIBUTION", "not-installed-by-that-name")
    root = Path(installed.__file__).parents[2]
    assert install_command("vision") == f'pip install "{root}[vision]"'
