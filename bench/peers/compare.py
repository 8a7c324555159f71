"""The driver: starts one worker an implementation, checks all, times them in turn, writes results.json.

Every worker sleeps (SIGSTOP) while another has its turn: some libraries spin when idle. A turn is one call to warm
up and some timed ones; turns go round until each has enough. So all see the same changes of the machine's
speed, and each finds the caches as another left them. Started by `run`, inside its environment.
"""

import contextlib
import json
import os
import pathlib
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import layer_data
import peers

HERE = pathlib.Path(__file__).resolve().parent
ANSWER_SECONDS = 600


class Gone(Exception):
    """A worker died; the text says how."""


class Worker:
    """One implementation on one or more ranks. Asleep but while it answers."""

    alive = set()  # must not outlive the driver: a stopped process would keep its gigabytes

    def __init__(self, name, num_ranks, cores, mode=()):
        self.name, self.num_ranks, self.mode = name, num_ranks, mode
        self.folder = tempfile.mkdtemp(prefix="argosy_peers_")
        listener = socket.socket(socket.AF_UNIX)
        path = os.path.join(self.folder, "s")
        listener.bind(path)
        listener.listen(num_ranks)
        listener.settimeout(ANSWER_SECONDS)
        self.links, self.pids = [None] * num_ranks, []
        self.errors = {}  # by number of tokens, against float64
        self.alive.add(self)
        self.processes = [subprocess.Popen(words, env=environment, stdout=sys.stderr)
                          for words, environment in self.commands(path, cores)]
        for _ in range(num_ranks):
            connection = self.accept(listener)
            stream = connection.makefile("rw")
            hello = json.loads(stream.readline())
            self.links[hello["rank"]] = stream
            self.pids.append(hello["pid"])
        self.signal(signal.SIGSTOP)

    def accept(self, listener):
        deadline = time.monotonic() + ANSWER_SECONDS
        listener.settimeout(1)
        while time.monotonic() < deadline:
            with contextlib.suppress(socket.timeout):
                connection = listener.accept()[0]
                connection.settimeout(ANSWER_SECONDS)
                return connection
            if any(process.poll() is not None for process in self.processes):
                break
        self.close()
        raise Gone("did not start")

    def commands(self, path, cores):
        words = [sys.executable, str(HERE / "worker.py"), path, self.name, *self.mode]
        environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1")
        environment["PYTHONPATH"] = os.pathsep.join([str(HERE), str(peers.HOME / "kt"), str(peers.HOME / "zentorch")])
        if self.num_ranks == 1:
            # kt-kernel's caller needs a core beside its worker's.
            mask = ",".join(map(str, cores)) if self.name.startswith("kt-kernel") else str(cores[0])
            return [(["taskset", "-c", mask, *words], environment)]
        if self.name == "argosy":
            job = secrets.token_hex(8)
            return [(["taskset", "-c", str(cores[rank % len(cores)]), *words, "ranks"],
                     dict(environment, RANK=str(rank), WORLD_SIZE=str(self.num_ranks), ARGOSY_JOB=job))
                    for rank in range(self.num_ranks)]
        launcher = ["mpirun", "--allow-run-as-root", "--bind-to", "core", "-n", str(self.num_ranks)]
        return [([*launcher, *words, "ranks"], environment)]

    def signal(self, number):
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def ask(self, request):
        """The answers of all ranks. Raises Gone."""
        self.signal(signal.SIGCONT)
        try:
            for link in self.links:
                link.write(json.dumps(request) + "\n")
                link.flush()
            lines = [link.readline() for link in self.links]
        except OSError as problem:
            raise Gone(f"no answer: {problem}") from problem
        if not all(lines):
            raise Gone(self.how_it_ended())
        self.signal(signal.SIGSTOP)
        return [json.loads(line) for line in lines]

    def how_it_ended(self):
        code = self.processes[0].wait(timeout=60)
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"

    def close(self):
        self.alive.discard(self)
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.kill()
            process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def problem_of(answers):
    refusals = [answer["refused"] for answer in answers if "refused" in answer]
    return refusals[0] if refusals else None


def check_peer(name, cores, cases, tolerance, mode=()):
    """case -> text, "ok" first when it is right. A worker that dies is started again for the next case."""
    verdicts, worker = {}, None
    for case in cases:
        try:
            worker = worker or Worker(name, 1, cores, mode)
            answers = worker.ask({"do": "check", "case": case})
            refusal = problem_of(answers)
            error = None if refusal else max(answer["error"] for answer in answers)
            verdicts[case] = refusal or f"{'ok' if error < tolerance else 'WRONG'} ({error:.1e})"
        except Gone as problem:
            verdicts[case] = str(problem)
            if worker is not None:
                worker.close()
            worker = None
    if worker is not None:
        worker.close()
    return verdicts


def load_full(worker, folder, counts, checked):
    """None when the worker is ready and right at full size, else why not. Its errors are kept with it."""
    refusal = problem_of(worker.ask({"do": "load", "folder": folder, "counts": counts}))
    if refusal:
        return refusal
    for count in checked:
        answers = worker.ask({"do": "full_error", "folder": folder, "count": count})
        refusal = problem_of(answers)
        if refusal:
            return refusal
        worker.errors[count] = {kind: max(answer[kind] for answer in answers) for kind in ("error", "rms_error")}
        if worker.errors[count]["error"] >= peers.TOLERANCE[worker.name]:
            return f"WRONG at full size ({worker.errors[count]['error']:.1e})"
    return None


def one_turn(worker, count, num_calls):
    """Seconds of each call: over ranks from the first begin to the last end."""
    answers = worker.ask({"do": "times", "count": count, "num_calls": num_calls})
    refusal = problem_of(answers)
    if refusal:
        raise Gone(refusal)
    by_call = zip(*(answer["spans"] for answer in answers))
    return [max(end for _, end in spans) - min(begin for begin, _ in spans) for spans in by_call]


def time_in_turn(workers, count, seconds, skipped):
    """name -> seconds of calls. Whoever is gone is left out and noted."""
    times = {name: [] for name in workers}
    deadline = time.monotonic() + seconds * max(1, len(workers))
    least_turns, turn = 3, 0
    while turn < least_turns or time.monotonic() < deadline:
        for name, worker in list(workers.items()):
            try:
                times[name] += one_turn(worker, count, layer_data.num_routings(count))
            except Gone as problem:
                skipped[f"{name}, T={count}"] = str(problem)
                workers.pop(name).close()
                times.pop(name)
        turn += 1
    return times


def summary(times, count):
    shape = layer_data.FULL
    operations = 6 * count * shape.top_k * shape.hidden * shape.intermediate
    return [{"peer": name, "T": count, "median_seconds": statistics.median(seconds), "min_seconds": min(seconds),
             "max_seconds": max(seconds), "calls": len(seconds),
             "operations_per_second": operations / statistics.median(seconds)}
            for name, seconds in times.items() if seconds]


def start(names, num_ranks, cores, folder, counts, checked, skipped):
    workers = {}
    for name in names:
        try:
            worker = Worker(name, num_ranks, cores)
            reason = load_full(worker, folder, counts, checked)
            if reason is None:
                workers[name] = worker
                continue
            worker.close()
        except Gone as problem:
            reason = str(problem)
        skipped[name if num_ranks == 1 else f"{name}, {num_ranks} ranks"] = reason
    return workers


def compare(names, num_ranks, cores, folder, counts, checked, seconds, skipped):
    print(f"loading {', '.join(names)} on {num_ranks} rank(s)", file=sys.stderr)
    workers = start(names, num_ranks, cores, folder, counts, checked, skipped)
    results = []
    try:
        for count in counts:
            print(f"timing T={count}, {num_ranks} rank(s)", file=sys.stderr)
            found = summary(time_in_turn(workers, count, seconds, skipped), count)
            results += [{**result, **workers[result["peer"]].errors.get(count, {})} for result in found]
    finally:
        for worker in workers.values():
            worker.close()
    return results


def best_for_ranks(results):
    """The torch peer that is fastest at the largest T: what the MPI recipe is put around."""
    fit = {name for name, kind in peers.PEERS.items()
           if issubclass(kind, peers.TorchPeer) and kind is not peers.KtKernel}
    largest = max((r["T"] for r in results), default=0)
    times = {r["peer"]: r["median_seconds"] for r in results if r["T"] == largest and r["peer"] in fit}
    return min(times, key=times.get) if times else None


@contextlib.contextmanager
def workers_end():
    """No worker is left behind, however this ends."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        yield
    finally:
        for worker in list(Worker.alive):
            worker.close()


def run(names, counts, seconds, with_ranks, unavailable):
    """All of bf16; returns what report.py renders."""
    with workers_end():
        return run_all(names, counts, seconds, with_ranks, unavailable)


def run_quantised(names, counts, seconds, unavailable):
    """The layers with quantised weights of the implementations `names`, each result with its error."""
    skipped = {}
    wanted = [name for name in peers.QUANTISED if name.split()[0] in names and name.split()[0] not in unavailable]
    with workers_end(), tempfile.TemporaryDirectory(prefix="argosy_peers_") as folder:
        layer_data.save_full(folder, counts, counts)
        cores = sorted(os.sched_getaffinity(0))
        results = compare(wanted, 1, cores, folder, counts, counts, seconds, skipped)
    for result in results:
        result["bits"] = 8 if result["peer"] in peers.EIGHT_BITS else 4 if result["peer"] in peers.FOUR_BITS else 16
    return {"cpu": cpu_name(), "shape": vars(layer_data.FULL), "results": results, "skipped": skipped}


def run_all(names, counts, seconds, with_ranks, unavailable):
    cores = sorted(os.sched_getaffinity(0))
    skipped = dict(unavailable)
    checks = {}
    for name in names:
        print(f"checking {name}", file=sys.stderr)
        checks[name] = check_peer(name, cores, layer_data.check_cases(), peers.TOLERANCE[name])
    with tempfile.TemporaryDirectory(prefix="argosy_peers_") as folder:
        print("making the inputs and their reference", file=sys.stderr)
        checked = [min(counts)]
        layer_data.save_full(folder, counts, checked)
        one = compare(names, 1, cores, folder, counts, checked, seconds, skipped)
        best = best_for_ranks(one) if with_ranks else None
        two = (compare(["argosy", best], 2, cores, folder, counts, checked, seconds, skipped)
               if best else [])
    return {"cpu": cpu_name(), "cores": len(cores), "shape": vars(layer_data.FULL), "checks": checks,
            "skipped": skipped, "one_rank": one, "two_ranks": two}


def cpu_name():
    for line in pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return "unknown"
