"""Training steps: forward and backward with all gradients, checked, timed in turn.

Workers as in compare.py. A step takes seconds, so a turn is one step, and there is no warming up but the first
one, which is held against float64 at full size. An implementation that takes minutes runs that first step alone.
"""

import os
import statistics
import sys
import tempfile

import compare
import train_data
import train_peers
from compare import Gone, Worker, problem_of

MODE = ("train",)
LEAST_TURNS = 5


def ask(worker, request):
    answers = worker.ask(request)
    refusal = problem_of(answers)
    if refusal:
        raise Gone(refusal)
    return answers[0]


def first_step(worker, folder, shape, result):
    """Loads the worker; its first step's errors and seconds go into `result`. Raises Gone when it is wrong."""
    ask(worker, {"do": "load", "folder": folder, "top_k": shape.top_k})
    answer = ask(worker, {"do": "first_step"})
    result.update(errors=answer["errors"], first_seconds=answer["seconds"], seconds=[])
    kind, error = train_data.worst_of(answer["errors"])
    if not error < train_peers.TOLERANCE:
        raise Gone(f"WRONG at full size: {kind} ({error:.1e})")


def run_shape(names, shape, cores, seconds, skipped):
    """The results of one shape; whoever cannot do it is in `skipped`."""
    results, workers = {}, {}
    with tempfile.TemporaryDirectory(prefix="argosy_peers_") as folder:
        print(f"making the inputs and their reference, {train_data.shape_name(shape)}", file=sys.stderr)
        train_data.save_full(folder, shape)
        # The slow ones first, each alone: they take memory as well.
        for name in sorted(names, key=lambda n: not getattr(train_peers.PEERS[n], "is_slow", False)):
            print(f"first step of {name}", file=sys.stderr)
            worker = None
            try:
                worker = Worker(name, 1, cores, MODE)
                result = {"peer": name}
                first_step(worker, folder, shape, result)
                results[name] = result
                if getattr(train_peers.PEERS[name], "is_slow", False):
                    result["seconds"] = [result["first_seconds"]]
                else:
                    workers[name], worker = worker, None
            except Gone as problem:
                skipped[f"{name}, {train_data.shape_name(shape)}"] = str(problem)
            finally:
                if worker is not None:
                    worker.close()
    print(f"timing {train_data.shape_name(shape)}", file=sys.stderr, flush=True)
    take_turns(workers, results, seconds, f", {train_data.shape_name(shape)}", skipped)
    return [summary(result, shape) for result in results.values() if result["seconds"]]


def take_turns(workers, results, seconds, where, skipped):
    """At least LEAST_TURNS, more while everybody has not had `seconds`."""
    turn = 0
    while workers and (turn < LEAST_TURNS or min(sum(results[name]["seconds"]) for name in workers) < seconds):
        for name, worker in list(workers.items()):
            try:
                results[name]["seconds"] += ask(worker, {"do": "times", "num_calls": 1})["seconds"]
            except Gone as problem:
                skipped[name + where] = str(problem)
                workers.pop(name).close()
        turn += 1
    for worker in workers.values():
        worker.close()


def summary(result, shape):
    seconds = result["seconds"]
    median = statistics.median(seconds)
    return {"peer": result["peer"], "shape": train_data.shape_name(shape), "median_seconds": median,
            "min_seconds": min(seconds), "max_seconds": max(seconds), "calls": len(seconds),
            "operations_per_second": train_data.operations(shape) / median, "errors": result["errors"]}


def run(names, seconds, unavailable):
    cores = sorted(os.sched_getaffinity(0))
    skipped = {name: why for name, why in unavailable.items() if name in train_peers.PEERS}
    checks, results = {}, []
    with compare.workers_end():
        for name in names:
            print(f"checking the training step of {name}", file=sys.stderr)
            checks[name] = compare.check_peer(name, cores, train_data.check_cases(), train_peers.TOLERANCE, MODE)
        for shape in train_data.SHAPES:
            results += run_shape(names, shape, cores, seconds, skipped)
    return {"cpu": compare.cpu_name(), "checks": checks, "results": results, "skipped": skipped}
