"""Two replicas behind a router, one of which goes away while requests run: every request must still be answered in full.

It goes in two ways: stopped in good order (SIGTERM: it drains, and says 503 to what comes late), and killed without a word.
"""

import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request

from served import PATIENCE_S, Served

WORKERS = 6
ROUTES = ("/v1/completions", "/v1/chat/completions")
# While a replica goes away, and until its router can have noticed.
BEFORE_S, AFTER_S = 1.5, 5.0


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Router:
    def __init__(self, command, replicas):
        self.port, metrics = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tempfile.TemporaryFile("w+")
        arguments = [
            "--host", "127.0.0.1", "--port", self.port, "--worker-urls", *(replica.url for replica in replicas), "--policy", "round_robin",
            "--prometheus-host", "127.0.0.1", "--prometheus-port", metrics, "--health-check-interval-secs", 1, "--health-failure-threshold", 1,
        ]
        self.process = subprocess.Popen(
            list(map(str, [*command, *arguments])), stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True
        )

    def ready(self):
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/readiness", timeout=2) as answer:
                    if answer.status == 200:
                        return True
            except OSError:
                pass
            time.sleep(0.1)
        return False

    def tail(self):
        self.log.seek(0)
        return re.sub(r"\x1b\[[\d;]*m", "", self.log.read())[-600:]

    def stop(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                return
            try:
                self.process.wait(3)
            except subprocess.TimeoutExpired:
                pass


class Load:
    """Workers that ask without a pause until told to stop; every answer is looked at."""

    def __init__(self, url, model):
        self.url, self.model = url, model
        self.over = threading.Event()
        self.lock = threading.Lock()
        self.answered, self.lost = 0, []
        self.threads = [threading.Thread(target=self.work, args=(number,)) for number in range(WORKERS)]
        for thread in self.threads:
            thread.start()

    def work(self, number):
        turn = 0
        while not self.over.is_set():
            turn += 1
            error = self.ask(f"{number} asks for the {turn}th time:", chat=turn % 3 == 0)
            with self.lock:
                if error is None:
                    self.answered += 1
                else:
                    self.lost.append(error)

    def ask(self, prompt, chat):
        """None, or what was wrong."""
        body = {"model": self.model, "max_tokens": 24, "ignore_eos": True, "temperature": 0}
        body |= {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
        path = "/v1/chat/completions" if chat else "/v1/completions"
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:
                tokens = json.load(answer)["usage"]["completion_tokens"]
                return None if tokens == 24 else f"{tokens} tokens"
        except urllib.error.HTTPError as error:
            return f"{error.code}: {error.read(200)!r}"
        except (OSError, ValueError, KeyError) as error:
            return repr(error)

    def end(self):
        self.over.set()
        for thread in self.threads:
            thread.join()


def check(command, binary, record, every_replica=False):
    """Runs the whole case; `every_replica` takes both away, which must be seen."""
    for how in ("terminated",) if every_replica else ("terminated", "killed"):
        replicas = [Served(binary), Served(binary)]
        record.contract_hash = replicas[1].contract_hash()
        router = Router(command, replicas)
        try:
            if not record.check(f"{how}: the router becomes ready", router.ready(), "" if router.process.poll() is None else router.tail()):
                return
            # Its health checks have found both replicas.
            time.sleep(2)
            leave_one(how, replicas, router, record, every_replica)
        finally:
            router.stop()
            for replica in replicas:
                replica.leave()


def leave_one(how, replicas, router, record, every_replica):
    load = Load(router.url, replicas[0].model)
    time.sleep(BEFORE_S)
    shares = [sum(count for (route, _), count in replica.statuses().items() if route in ROUTES) for replica in replicas]
    for victim in replicas if every_replica else replicas[:1]:
        victim.terminate() if how == "terminated" else victim.kill()
    before = load.answered
    time.sleep(AFTER_S)
    load.end()
    asked = load.answered + len(load.lost)
    record.check(f"{how}: both replicas had requests", min(shares) > WORKERS, f"{shares}")
    record.check(f"{how}: requests went on", load.answered > before, f"{before} answered before, {load.answered} in all")
    record.check(f"{how}: no request lost", not load.lost, f"{len(load.lost)} of {asked}: {load.lost[:3]}")
    record.metric(f"answered while a replica is {how}", load.answered, "requests", asked)
    record.metric(f"lost while a replica is {how}", len(load.lost), "requests", asked)
    if every_replica:
        return
    if how == "terminated":
        code = replicas[0].leave()
        record.check("the terminated replica drained", code == 0, f"exit {code}")
    idle, values = replicas[1].idle()
    record.check(f"{how}: the survivor is idle", idle, values)
    complaints = replicas[1].complaints()
    record.check(f"{how}: the survivor's log is clean", not complaints, complaints[:2])


def smg(tools):
    return [tools.venv("smg") / "smg", "launch"]


def vllm_router(tools):
    return [tools.venv("vllm-router") / "vllm-router"]


def sglang_router(tools):
    return [tools.venv("sglang-router") / "sglang-router", "launch"]


ROUTERS = {
    "router-smg": (smg, "smg"),
    "router-vllm": (vllm_router, "vllm-router"),
    "router-sglang": (sglang_router, "sglang-router"),
}
