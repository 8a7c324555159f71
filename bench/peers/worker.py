"""One implementation in a process of its own: answers the driver's requests over a Unix socket.

    worker.py SOCKET NAME           one rank
    worker.py SOCKET NAME ranks     one of the ranks that mpirun or compare.py starts (RANK, WORLD_SIZE or
                                    Open MPI's variables); NAME runs inside the MPI recipe, or is argosy
    worker.py SOCKET NAME train     one rank, training steps (train_peers.py)

Requests and answers are lines of JSON. A worker answers everything; what a library cannot do is an answer too,
and a worker that dies was killed by its library.
"""

import ctypes
import json
import os
import socket
import sys
import time

import numpy as np

import layer_data
import peers
import train_data
import train_peers


class MpiPeer:
    """A peer's experts of this rank, each row a token with one expert, inside the MPI recipe."""

    def __init__(self, name, gate_up, down, top_k):
        self.lib = ctypes.CDLL(str(peers.HOME / "build/libmpi_exchange.so"), mode=ctypes.RTLD_GLOBAL)
        self.lib.mpi_exchange_create.restype = ctypes.c_void_p
        self.lib.mpi_exchange_dispatch.restype = ctypes.c_int64
        self.top_k, self.num_ranks = top_k, int(os.environ["OMPI_COMM_WORLD_SIZE"])
        self.num_local, self.hidden = len(down) // self.num_ranks, down.shape[1]
        self.exchange = ctypes.c_void_p(self.lib.mpi_exchange_create(ctypes.c_int64(self.hidden), len(down)))
        self.rank = self.lib.mpi_exchange_rank(self.exchange)
        mine = slice(self.rank * self.num_local, (self.rank + 1) * self.num_local)
        self.peer = peers.PEERS[name](gate_up[mine], down[mine], 1)
        self.rows = np.empty((0, self.hidden), np.uint16)

    def barrier(self):
        self.lib.mpi_exchange_barrier(self.exchange)

    def prepare(self, x, experts, weights):
        return [np.ascontiguousarray(a) for a in (x, experts, weights)] + [np.empty_like(x)]

    def run(self, call):
        x, experts, weights, out = call
        rows_per_expert = np.zeros(self.num_local, np.int32)
        count = self.lib.mpi_exchange_dispatch(self.exchange, len(x), self.top_k, peers.pointer(x),
                                               peers.pointer(experts), peers.pointer(rows_per_expert))
        if count > len(self.rows):
            self.rows = np.empty((count + count // 4, self.hidden), np.uint16)
        rows = self.rows[:count]
        self.lib.mpi_exchange_rows(self.exchange, peers.pointer(rows))
        if count:
            local = np.repeat(np.arange(self.num_local, dtype=np.int32), rows_per_expert).reshape(-1, 1)
            inner = self.peer.wrap(rows, local, np.ones((count, 1), np.float32))
            # No copy through fp32: the bits are what travels.
            result = self.peer.run(inner).view(self.peer.torch.int16).numpy().view(np.uint16)
        else:
            result = rows
        self.lib.mpi_exchange_combine(self.exchange, len(x), self.top_k, peers.pointer(result),
                                      peers.pointer(weights), peers.pointer(out))
        return out

    def result(self, call, out):
        return layer_data.to_float(out)


class Worker:
    def __init__(self, name, in_ranks):
        self.name, self.in_ranks = name, in_ranks
        self.rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("RANK", "0")))
        self.num_ranks = int(os.environ.get("OMPI_COMM_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))
        self.peer = None
        self.calls = {}
        # zentorch keeps packed weights by their address: what it has seen must not be freed and reused.
        self.checked = []

    def make(self, gate_up, down, top_k):
        if not self.in_ranks:
            return peers.find(self.name)(gate_up, down, top_k)
        if self.name == "argosy":
            return peers.Argosy(gate_up, down, top_k, self.rank, self.num_ranks, os.environ["ARGOSY_JOB"])
        return MpiPeer(self.name, gate_up, down, top_k)

    def share(self, array):
        """This rank's tokens."""
        n = len(array)
        return array[n * self.rank // self.num_ranks:n * (self.rank + 1) // self.num_ranks]

    def check(self, case):
        """Largest relative error on one of the small cases, as text."""
        x, experts, weights = layer_data.check_cases()[case]
        gate_up, down = layer_data.make_weights(layer_data.SMALL, 7)
        peer = self.make(gate_up, down, experts.shape[1])
        self.checked.append(peer)
        call = peer.prepare(x, experts, weights)
        got = peer.result(call, peer.run(call)).astype(np.float64)
        want = layer_data.reference(x, gate_up, down, experts, weights)
        return {"error": layer_data.relative_error(got, want)}

    def load(self, folder, counts):
        self.peer = self.make(layer_data.load(folder, "gate_up", writable=True),
                              layer_data.load(folder, "down", writable=True), layer_data.FULL.top_k)
        for count in counts:
            x = layer_data.load(folder, f"x_{count}")
            self.calls[count] = [
                self.peer.prepare(self.share(x), self.share(layer_data.load(folder, f"experts_{count}_{i}")),
                                  self.share(layer_data.load(folder, f"weights_{count}_{i}")))
                for i in range(layer_data.num_routings(count))]
        return {}

    def full_error(self, folder, count):
        """The first routing of `count` tokens at full size; the driver has made the reference of the first of them."""
        call = self.calls[count][0]
        want = layer_data.load(folder, f"want_{count}")
        tokens = self.share(np.arange(count))
        known = tokens < len(want)
        want, got = want[tokens[known]], self.peer.result(call, self.peer.run(call))[known].astype(np.float64)
        return {"error": layer_data.relative_error(got, want), "rms_error": layer_data.relative_rms(got, want)}

    def times(self, count, num_calls):
        """Begin and end of each call on the host's clock; the first, untimed call warms up."""
        calls = self.calls[count]
        spans = []
        for i in range(num_calls + 1):
            if self.in_ranks:
                self.peer.barrier()
            begin = time.monotonic()
            self.peer.run(calls[i % len(calls)])
            spans.append([begin, time.monotonic()])
        return {"spans": spans[1:]}

    def answer(self, request):
        kind = request.pop("do")
        return {"check": self.check, "load": self.load, "full_error": self.full_error,
                "times": self.times}[kind](**request)


class TrainWorker:
    """One implementation of the training step."""
    rank = 0

    def __init__(self, name):
        self.make = train_peers.PEERS[name]
        self.checked = []

    def check(self, case):
        """Largest relative error of output and gradients on one of the small cases."""
        inputs = train_data.check_cases()[case]
        peer = self.make(inputs.gate, inputs.gate_up, inputs.down, train_data.SMALL.top_k)
        self.checked.append(peer)
        call = peer.prepare(inputs.x, inputs.d_output)
        every = list(range(train_data.SMALL.num_experts))
        got = peer.result(call, peer.run(call), every)
        want = train_data.reference(inputs, train_data.SMALL.top_k, every)
        return {"error": train_data.worst_of(train_data.errors_of(got, want))[1]}

    def load(self, folder, top_k):
        inputs, self.experts, self.want = train_data.load_full(folder)
        self.peer = self.make(inputs.gate, inputs.gate_up, inputs.down, top_k)
        self.call = self.peer.prepare(inputs.x, inputs.d_output)
        return {}

    def first_step(self):
        """A step from cold, held against the reference."""
        begin = time.monotonic()
        out = self.peer.run(self.call)
        seconds = time.monotonic() - begin
        got = self.peer.result(self.call, out, self.experts)
        return {"seconds": seconds, "errors": train_data.errors_of(got, self.want)}

    def times(self, num_calls):
        seconds = []
        for _ in range(num_calls):
            begin = time.monotonic()
            self.peer.run(self.call)
            seconds.append(time.monotonic() - begin)
        return {"seconds": seconds}

    def answer(self, request):
        kind = request.pop("do")
        return {"check": self.check, "load": self.load, "first_step": self.first_step,
                "times": self.times}[kind](**request)


def main():
    mode = sys.argv[3] if len(sys.argv) > 3 else ""
    worker = TrainWorker(sys.argv[2]) if mode == "train" else Worker(sys.argv[2], mode == "ranks")
    link = socket.socket(socket.AF_UNIX)
    link.connect(sys.argv[1])
    stream = link.makefile("rw")

    def send(answer):
        stream.write(json.dumps(answer) + "\n")
        stream.flush()

    send({"pid": os.getpid(), "rank": worker.rank})
    for line in stream:
        try:
            send(worker.answer(json.loads(line)))
        except Exception as problem:  # whatever a library raises is its answer
            send({"refused": f"{type(problem).__name__}: {str(problem).splitlines()[0][:160]}"})


if __name__ == "__main__":
    main()
