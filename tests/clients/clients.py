"""The clients: how each is run against a server, and what its output and the server's own count of statuses must say.

A client is a function (tools, served, model) that records checks and metrics. Every status other than 200 that a client provokes on purpose is
listed with how often; any other one fails the run.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).resolve().parent
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "DO_NOT_TRACK": "1"}
MODEL_FOLDER = HERE.parent / "models/shakespeare-dsv2"


class Record:
    """What one run showed."""

    def __init__(self):
        self.checks, self.metrics, self.versions, self.contract_hash = [], [], {}, ""

    def check(self, name, holds, detail=""):
        self.checks.append({"name": name, "pass": bool(holds), "detail": str(detail)})
        return bool(holds)

    def metric(self, name, value, unit, samples=1):
        entry = {"name": name, "value": float(value), "unit": unit, "samples": int(samples), "limit": None}
        self.metrics.append(entry)

    def passed(self):
        return bool(self.checks) and all(check["pass"] for check in self.checks)

    def run(self, name, command, timeout=180, variables=None):
        """Runs a program; its exit code must be 0. Its output, both streams."""
        environment = {**os.environ, **OFFLINE, **(variables or {})}
        try:
            done = subprocess.run(
                list(map(str, command)), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout,
                text=True, env=environment,
            )
        except subprocess.TimeoutExpired as late:
            self.check(f"{name}: exit 0", False, f"not done after {timeout} s: {str(late.output)[-300:]}")
            return str(late.output)
        detail = "" if done.returncode == 0 else f"exit {done.returncode}: {done.stdout[-600:]}"
        self.check(f"{name}: exit 0", done.returncode == 0, detail)
        return done.stdout

    def statuses(self, served, before, least, provoked=()):
        """The server's count: at least `least` answers of 200 per route, the provoked refusals exactly, and nothing else."""
        seen = served.statuses() - before
        refused = Counter({key: count for key, count in seen.items() if key[1] != 200})
        for route, count in least.items():
            got = seen[route, 200]
            self.check(f"{route} answered 200", got >= count, f"{got} times, at least {count} expected")
            self.metric(f"answers_200 {route}", got, "requests", got)
        wanted = Counter(dict(provoked))
        self.check("no status but 200 and the provoked ones", refused == wanted, f"{dict(refused)}, expected {dict(wanted)}")


def openai_python(tools, served, model, record):
    bin_folder, before = tools.venv("openai"), served.statuses()
    out = record.run("SDK checks", [bin_folder / "python", HERE / "openai_sdk.py", served.url, model])
    passed = re.search(r"^openai (\S+): (\d+) checks passed$", out, re.M)
    record.check("every SDK check reported", passed, out[-200:])
    if passed:
        record.versions["openai"] = passed[1]
        record.metric("checks", int(passed[2]), "checks")
    provoked = {("/v1/models/id", 404): 1, (COMPLETIONS, 404): 1, (CHAT, 400): 1, (COMPLETIONS, 400): 1}
    record.statuses(served, before, {COMPLETIONS: 10, CHAT: 7, "/v1/models": 1, "/v1/models/id": 1}, provoked.items())


def openai_node(tools, served, model, record):
    folder, before = tools.node(), served.statuses()
    out = record.run("SDK checks", ["node", folder / "sdk.mjs", served.url, model])
    record.check("every SDK check reported", re.search(r"^\d+ checks passed$", out, re.M), out[-200:])
    for name in ("openai", "ai", "@ai-sdk/openai-compatible"):
        record.versions[name] = json.loads((folder / "node_modules" / name / "package.json").read_text())["version"]
    record.statuses(served, before, {COMPLETIONS: 2, CHAT: 5, "/v1/models": 1}, {("/v1/models/id", 404): 1, (CHAT, 400): 1}.items())


def vllm_bench(tools, served, model, record):
    """Text prompts over both routes; random token ids besides (as text they need not survive a byte-level tokenizer)."""
    program, digest = tools.wheel_file("vllm==0.33.0", "vllm/vllm-rs", "vllm-rs")
    record.versions.update({"vllm": "0.33.0", "vllm-rs sha256": digest})
    prompts = 32
    lines = "".join(json.dumps({"prompt": f"Enter HAMLET, reading for the {number}th time."}) + "\n" for number in range(prompts))
    random_ids = ["--dataset-name", "random", "--random-input-len", 64, "--random-output-len", 16, "--prompt-token-ids"]
    for name, backend, route, random in (
        ("completions", "openai", COMPLETIONS, False), ("chat", "openai-chat", CHAT, False), ("token ids", "openai", COMPLETIONS, True),
    ):
        before = served.statuses()
        with tempfile.TemporaryDirectory() as results, tempfile.NamedTemporaryFile("w", suffix=".jsonl") as dataset:
            dataset.write(lines)
            dataset.flush()
            custom = ["--dataset-name", "custom", "--dataset-path", dataset.name, "--custom-output-len", 16]
            record.run(name, [
                program, "bench", "serve", "--backend", backend, "--base-url", served.url, "--endpoint", route, "--model", model,
                "--tokenizer", MODEL_FOLDER, *(random_ids if random else custom), "--num-prompts", prompts,
                "--max-concurrency", 4, "--request-rate", "inf", "--ignore-eos", "--seed", 0, "--disable-tqdm",
                "--ready-check-timeout-sec", 3, "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99",
                "--save-result", "--result-dir", results,
            ])
            bench(record, name, Path(results), prompts)
        record.statuses(served, before, {route: prompts})


def sglang_bench(tools, served, model, record):
    module = "_bench.cpython-311-x86_64-linux-gnu.so"
    file, digest = tools.wheel_file("sglang==0.5.23", "sglang/srt/rust_extensions/_bench.cpython-311-*.so", module)
    record.versions.update({"sglang": "0.5.23", "_bench sha256": digest})
    start = "import sys, _bench; _bench.run_argv(['sglang-bench'] + sys.argv[1:])"
    before, prompts = served.statuses(), 32
    with tempfile.TemporaryDirectory() as folder:
        record.run("vllm backend", [
            sys.executable, "-c", start, "--backend", "vllm", "--base-url", served.url, "--model", model, "--tokenizer", MODEL_FOLDER,
            "--dataset-name", "random-ids", "--random-input-len", 64, "--random-output-len", 16,
            "--random-range-ratio", 1, "--num-prompts", prompts, "--max-concurrency", 4, "--output-file", Path(folder) / "sglang.json",
        ], variables={"PYTHONPATH": str(file.parent)})
        bench(record, "vllm backend", Path(folder), prompts)
    # /model_info is one of SGLang's own routes; its client goes on without it.
    record.statuses(served, before, {COMPLETIONS: prompts}, {("other", 404): 1}.items())


def bench(record, name, folder, prompts):
    """Reads the one result file that a benchmark left: every prompt was answered, with tokens."""
    files = sorted(folder.iterdir())
    if not record.check(f"{name}: one result file", len(files) == 1, [file.name for file in files]):
        return
    result = json.loads(files[0].read_text().splitlines()[-1] if files[0].suffix == ".jsonl" else files[0].read_text())
    completed, failed = result.get("completed"), result.get("failed", 0)
    record.check(f"{name}: every prompt answered", completed == prompts and not failed, f"{completed} completed, {failed} failed")
    tokens = result.get("total_output_tokens", 0)
    record.check(f"{name}: every answer has its tokens", tokens == 16 * prompts, f"{tokens} tokens")
    for key in ("request_throughput", "output_throughput"):
        if key in result:
            record.metric(f"{name} {key}", result[key], "1/s", prompts)


def http_tools(tools, served, model, record):
    wrk, h2load = tools.program("wrk", "wrk"), tools.program("h2load", "nghttp2-client")
    slow, promtool = tools.program("slowhttptest", "slowhttptest"), tools.program("promtool", "prometheus")
    for package in ("wrk", "nghttp2-client", "slowhttptest", "prometheus"):
        asked = subprocess.run(["dpkg-query", "-W", "-f", "${Version}", package], stdout=subprocess.PIPE, text=True)
        record.versions[package] = asked.stdout
    before = served.statuses()
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        body = json.dumps({"model": model, "prompt": "hello", "max_tokens": 1, "temperature": 0})
        script.write(f'wrk.method="POST"; wrk.headers["Content-Type"]="application/json"; wrk.body=[[{body}]]')
        script.flush()
        for name, target, more in (("wrk completions", COMPLETIONS, ["-s", script.name]), ("wrk health", "/health", [])):
            out = record.run(name, [wrk, "-t1", "-c8", "-d3s", "--latency", *more, served.url + target])
            served_rate = re.search(r"^Requests/sec:\s+([\d.]+)$", out, re.M)
            bad = re.search(r"(Non-2xx|Socket errors).*", out)
            record.check(f"{name}: only 200, no socket error", served_rate and float(served_rate[1]) > 0 and not bad, bad and bad[0])
            if served_rate:
                record.metric(name, float(served_rate[1]), "requests/s")
    out = record.run("h2load over HTTP/1.1", [h2load, "--h1", "-n", 200, "-c", 4, served.url + "/health"])
    whole = re.search(r"200 total, 200 started, 200 done, 200 succeeded, 0 failed, 0 errored, 0 timeout", out)
    record.check("h2load: 200 of 200", whole and "status codes: 200 2xx" in out, out[-300:])
    out = record.run("slow headers", [slow, "-c", 50, "-H", "-i", 2, "-r", 25, "-l", 6, "-u", served.url + "/health"])
    said = re.findall(r"service available:\S*\s+\S*?(YES|NO)", re.sub(r"\x1b\[[\d;]*m", "", out))
    record.check("slow headers: available throughout", said and set(said) == {"YES"}, f"{said}")
    lint = subprocess.run([promtool, "check", "metrics"], input=served.get("/metrics"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    findings = [line for line in lint.stdout.splitlines() if "should not contain ':'" not in line]
    record.check("promtool: nothing but vLLM's colons", lint.returncode in (0, 3) and not findings, f"exit {lint.returncode}: {findings}")
    record.statuses(served, before, {COMPLETIONS: 1})


CLIENTS = {
    "openai-python": openai_python,
    "openai-node": openai_node,
    "http-tools": http_tools,
    "vllm-bench": vllm_bench,
    "sglang-bench": sglang_bench,
}
