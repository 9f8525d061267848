"""Real clients and routers against `slotgraph serve` on the CPU device; one evidence file each.

usage: run.py [--binary FILE] [--home DIR] [--out DIR] [--no-canary] NAME…    (or `all`)

Exit 0 if every one passed, else 1. What a client needs is installed, pinned, below --home; a tool that cannot be had fails its client. The planted
fault of a client is a model that is not served, of a router that both replicas go away: a run that does not notice fails.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

from clients import CLIENTS, HERE, Record
from routers import ROUTERS, check as check_router
from served import Served
from tools import Missing, Tools

ROOT = HERE.parents[1]
CLAIM = {"label": "the named client works with this server", "do_not_infer": "throughput: the machine was shared and the device is the CPU"}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--binary", type=Path, default=ROOT / "target/release/slotgraph")
    parser.add_argument("--home", type=Path, default=ROOT / "target/ci/clients")
    parser.add_argument("--out", type=Path, default=ROOT / "target/ci/clients/evidence")
    parser.add_argument("--no-canary", action="store_true", help="leave the planted fault out (and say so in the evidence)")
    parser.add_argument("names", nargs="+", choices=[*CLIENTS, *ROUTERS, "all"], metavar="NAME")
    arguments = parser.parse_args()
    names = [*CLIENTS, *ROUTERS] if "all" in arguments.names else arguments.names
    arguments.out.mkdir(parents=True, exist_ok=True)
    commit, dirty = git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    failed = []
    for name in names:
        began = time.monotonic()
        record, canary = attempt(name, arguments)
        verdict = record.passed() and (canary is None or canary["caught"])
        evidence = {
            "schema": 1,
            "probe": f"client-{name}",
            "question": f"does {name} work with this server, every answer as it expects it?",
            "verdict": "pass" if verdict else "fail",
            "commit": commit,
            "dirty": dirty,
            "machine": machine(),
            "config": {"device": "cpu", "model": "shakespeare-dsv2", "versions": record.versions},
            "contract_hash": record.contract_hash,
            "seed": 0,
            "command": ["python3", "tests/clients/run.py", *(["--no-canary"] if arguments.no_canary else []), name],
            "checks": record.checks,
            "canary": canary,
            "metrics": record.metrics,
            "claim": CLAIM,
        }
        (arguments.out / f"client-{name}.json").write_text(json.dumps(evidence, indent=2) + "\n")
        for check in record.checks:
            if not check["pass"]:
                print(f"  FAILED {check['name']}: {check['detail']}")
        if canary is not None and not canary["caught"]:
            print(f"  FAILED: the planted fault went unseen: {canary['fault']}")
        print(f"{name}: {evidence['verdict']}, {len(record.checks)} checks, {time.monotonic() - began:.0f} s", flush=True)
        failed += [] if verdict else [name]
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def attempt(name, arguments):
    """A run's record, and what its planted fault did."""
    tools, record, spoiled = Tools(arguments.home), Record(), Record()
    try:
        if name in ROUTERS:
            prepare, package = ROUTERS[name]
            command = prepare(tools)
            record.versions[package] = (HERE / f"requirements-{package}.txt").read_text().split(f"{package}==")[1].split()[0]
            check_router(command, arguments.binary, record)
            if arguments.no_canary:
                return record, None
            check_router(command, arguments.binary, spoiled, every_replica=True)
            caught = any("no request lost" in check["name"] and not check["pass"] for check in spoiled.checks)
            return record, {"fault": "both replicas go away", "caught": caught}
        served = Served(arguments.binary)
        record.contract_hash = served.contract_hash()
        try:
            CLIENTS[name](tools, served, served.model, record)
            idle, values = served.idle()
            record.check("the server is idle afterwards", idle, values)
            canary = None
            if not arguments.no_canary:
                CLIENTS[name](tools, served, "no-such-model", spoiled)
                canary = {"fault": "a model that is not served", "caught": not spoiled.passed()}
            record.check("the server's log is clean", not served.complaints(), served.complaints()[:2])
        finally:
            code = served.leave()
        record.check("the server stops in good order", code == 0, f"exit {code}")
        return record, canary
    except Missing as missing:
        record.check("its tools are there", False, missing)
        return record, None


def git(*words):
    return subprocess.run(["git", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()


def machine():
    fields = dict(line.split(":", 1) for line in Path("/proc/cpuinfo").read_text().splitlines() if ":" in line)
    memory = Path("/proc/meminfo").read_text().split()[1]
    rustc = subprocess.run(["rustc", "--version"], stdout=subprocess.PIPE, text=True).stdout.strip()
    return {
        "cpu": next((value.strip() for name, value in fields.items() if name.strip() == "model name"), ""),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": int(memory) * 1024,
        "kernel": platform.release(),
        "rustc": rustc,
        "gpu_driver": "",
        "gpus": [],
    }


if __name__ == "__main__":
    sys.exit(main())
