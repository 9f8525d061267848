"""A `slotgraph serve` process for the client runs: started on a free port, scraped, stopped, its log judged."""

import json
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter

PATIENCE_S = 60
SERIES = re.compile(r"^http_requests_total\{([^}]*)\} (\d+)$", re.M)
LABEL = re.compile(r'(\w+)="([^"]*)"')


class Served:
    """One replica on the demo model, CPU device."""

    def __init__(self, binary, *flags, port=0):
        self.log = tempfile.TemporaryFile("w+")
        command = [str(binary), "serve", "--device", "cpu", "--port", str(port), *flags]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self.log, text=True)
        line = self.process.stdout.readline()
        if not line.startswith("slotgraph_listening "):
            raise RuntimeError(f"the server did not listen: {self.text()}")
        said = json.loads(line.split(" ", 1)[1])
        self.url, self.port = said["url"], said["port"]
        deadline = time.monotonic() + PATIENCE_S
        while self.status("/health") != 200:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(f"the server did not become ready: {self.text()}")
            time.sleep(0.05)
        self.model = json.loads(self.get("/v1/models"))["data"][0]["id"]

    def get(self, path):
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return answer.read().decode()

    def contract_hash(self):
        """Names the arithmetic that answers come from."""
        return json.loads(self.get("/version"))["contract_hash"]

    def status(self, path):
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    def statuses(self):
        """How often each (route, status) was answered so far; the scrapes and health checks of this script are left out."""
        found = Counter()
        for labels, count in SERIES.findall(self.get("/metrics")):
            labels = dict(LABEL.findall(labels))
            handler, status = labels["handler"], labels["status"]
            if int(count) and handler != "/metrics" and not (handler == "/health" and status == "200"):
                found[handler, int(status)] += int(count)
        return found

    def idle(self):
        """Whether running, waiting and pages in use come to zero within two seconds."""
        deadline = time.monotonic() + 2
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "slotgraph_kv_pages_used")
        while True:
            text = self.get("/metrics")
            values = [float(re.search(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.M)[1]) for name in names]
            if not any(values) or time.monotonic() > deadline:
                return not any(values), dict(zip(names, values))
            time.sleep(0.02)

    def kill(self):
        """Without a word, as a machine that loses power."""
        self.process.kill()
        self.process.wait()

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def leave(self):
        """Stops it in good order; its exit code."""
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def text(self):
        self.log.seek(0)
        return self.log.read()

    def complaints(self):
        """Lines of the log that no client may cause."""
        lines = (line for line in self.text().splitlines() if not line.startswith("slotgraph_http_trace"))
        return [line for line in lines if "panicked" in line or "ERROR" in line]
