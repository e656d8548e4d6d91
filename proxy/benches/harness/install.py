"""Builds the proxy and the load, and installs pinned versions of the other bridges."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
ROOT = HERE.parent.parent
TARGET = ROOT / "target" / "proxy-benches"

NPM = {"supergateway": "4.0.0", "mcp-proxy": "6.7.19"}
PIP = {"mcp-proxy": "0.13.0"}


@dataclass(frozen=True)
class Programs:
    proxy: Path
    load: Path
    # The folder of the other bridges, if they are measured.
    cache: Path | None

    def npm(self, package):
        return self.cache / f"bench-{package}" / "node_modules" / ".bin" / package

    def pip(self, package):
        return self.cache / f"bench-python-{package}" / "bin" / package


def install(cache, with_peers):
    needed = ["cargo", "strip"] + ["node", "npm"] * with_peers
    if missing := [tool for tool in needed if shutil.which(tool) is None]:
        raise SystemExit(f"not found: {', '.join(missing)}")
    TARGET.mkdir(parents=True, exist_ok=True)
    target = ROOT / "target"
    build = ["cargo", "build", "--quiet", "--release", "--locked", "--target-dir", target]
    command(*build, "--package", "mcp-cancel-proxy", cwd=ROOT)
    command(*build, "--manifest-path", HERE / "load" / "Cargo.toml", cwd=ROOT)
    if with_peers:
        for package, version in NPM.items():
            npm_install(cache / f"bench-{package}", f"{package}@{version}")
        for package, version in PIP.items():
            pip_install(cache / f"bench-python-{package}", f"{package}=={version}")
    release = target / "release"
    return Programs(release / "mcp-cancel-proxy", release / "proxy-load", cache if with_peers else None)


def npm_install(folder, package):
    if not done(folder, package):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "package.json").write_text('{"private": true}')
        command("npm", "install", "--ignore-scripts", "--no-audit", "--no-fund", package, cwd=folder)
        mark(folder, package)


def pip_install(folder, package):
    if not done(folder, package):
        command(sys.executable, "-m", "venv", folder)
        command(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package)
        mark(folder, package)


def command(*words, cwd=None):
    done = subprocess.run([str(word) for word in words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} failed:\n{done.stdout}")
    return done.stdout


def done(folder, package):
    marker = folder / ".installed"
    return marker.exists() and marker.read_text() == package


def mark(folder, package):
    (folder / ".installed").write_text(package)
