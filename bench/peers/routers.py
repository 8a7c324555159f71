"""The router alone: Argosy against PyTorch, eager and compiled, logits given, one thread, in turn.

The PyTorch formulas are those of transformers (DeepseekV3TopkRouter, Qwen3MoeTopKRouter). They make no counts,
which Argosy's time holds too. Every router is held against float64 before it is timed.
"""

import ctypes
import statistics
import time

import numpy as np

import peers

NUM_TOKENS = 8192
# Least speed of Argosy over each PyTorch router; from the project's goals.
CASES = {
    "deepseek_v3": {"E": 256, "K": 8, "groups": 8, "keep_groups": 4, "factor": 2.5,
                    "goals": {"torch eager": 40, "torch.compile": 25}},
    "qwen3_moe": {"E": 128, "K": 8, "groups": 1, "keep_groups": 1, "factor": 1.0,
                  "goals": {"torch eager": 20, "torch.compile": 20}},
}


class ArgosyRouter:
    def __init__(self, preset, case, logits, bias):
        self.lib = ctypes.CDLL(str(peers.HOME / "build/argosy/libargosy_peer.so"))
        self.lib.argosy_router_create.restype = ctypes.c_void_p
        self.error = ctypes.create_string_buffer(2000)
        self.logits, self.bias, self.case = logits, bias, case
        shape = (ctypes.c_int64 * 4)(case["E"], case["K"], case["groups"], case["keep_groups"])
        self.handle = ctypes.c_void_p(self.lib.argosy_router_create(
            preset.encode(), shape, ctypes.c_float(case["factor"]), self.error, len(self.error)))
        if not self.handle:
            raise RuntimeError(self.error.value.decode())

    def run(self):
        bias = None if self.bias is None else peers.pointer(self.bias)
        if self.lib.argosy_router_run(self.handle, ctypes.c_int64(len(self.logits)), peers.pointer(self.logits), bias,
                                      self.error, len(self.error)):
            raise RuntimeError(self.error.value.decode())

    def result(self):
        shape = (len(self.logits), self.case["K"])
        experts, weights = np.empty(shape, np.int32), np.empty(shape, np.float32)
        self.lib.argosy_router_result(self.handle, peers.pointer(experts), peers.pointer(weights))
        return experts, weights


def torch_formula(torch, preset, case):
    top_k = case["K"]
    if preset == "qwen3_moe":
        def route(logits, bias):
            weights, experts = torch.topk(torch.softmax(logits, dim=-1), top_k, dim=-1)
            return experts, weights / weights.sum(dim=-1, keepdim=True)
        return route
    groups, kept, factor = case["groups"], case["keep_groups"], case["factor"]

    def route(logits, bias):
        scores = logits.sigmoid()
        choice = scores + bias
        by_group = choice.view(-1, groups, choice.shape[1] // groups)
        group_scores = by_group.topk(2, dim=-1)[0].sum(dim=-1)
        best = torch.topk(group_scores, k=kept, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(group_scores).scatter_(1, best, 1).bool()
        choice = by_group.masked_fill(~mask.unsqueeze(-1), float("-inf")).view(choice.shape)
        experts = torch.topk(choice, k=top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, experts)
        return experts, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20) * factor
    return route


class TorchRouter:
    def __init__(self, preset, case, logits, bias, compiled):
        import torch
        torch.set_num_threads(1)
        torch.set_grad_enabled(False)
        self.logits = torch.from_numpy(logits)
        self.bias = None if bias is None else torch.from_numpy(bias)
        route = torch_formula(torch, preset, case)
        self.route = torch.compile(route) if compiled else route

    def run(self):
        self.out = self.route(self.logits, self.bias)

    def result(self):
        return self.out[0].numpy(), self.out[1].numpy()


def reference(preset, case, logits, bias):
    """Selection scores, refused experts at -inf, and the scores that weights are made of, in float64."""
    z = logits.astype(np.float64)
    if preset == "qwen3_moe":
        scores = np.exp(z - z.max(axis=1, keepdims=True))
        return scores, scores
    scores = 1 / (1 + np.exp(-z))
    choice = (scores + bias).reshape(len(z), case["groups"], -1)
    sums = np.sort(choice, axis=2)[:, :, -2:].sum(axis=2)
    least = np.sort(sums, axis=1)[:, -case["keep_groups"]]
    choice[sums < least[:, None]] = -np.inf
    return choice.reshape(z.shape), scores


def check(router, preset, case, logits, bias):
    """Share of tokens with the experts of float64; raises when a choice or weight is off by more than rounding."""
    router.run()
    experts, weights = router.result()
    choice, scores = reference(preset, case, logits, bias)
    want = np.sort(choice, axis=1)[:, -case["K"]:]
    got = np.sort(np.take_along_axis(choice, experts.astype(np.int64), axis=1), axis=1)
    same = np.abs(got - want).max(axis=1) <= 1e-6
    own = np.take_along_axis(scores, experts.astype(np.int64), axis=1)
    exact = own / own.sum(axis=1, keepdims=True) * case["factor"]
    error = np.abs(weights - exact).max() / exact.max()
    if same.mean() < 0.999 or error > 1e-5:
        raise RuntimeError(f"wrong: {same.mean():.4f} of the tokens agree, weights off by {error:.1e}")
    return float(same.mean())


def run(seconds, skipped):
    """A list of {case, router, ns_per_token ..., ratio, goal}: what report.py shows."""
    results = []
    for preset, case in CASES.items():
        rng = np.random.default_rng(5)
        logits = rng.standard_normal((NUM_TOKENS, case["E"]), np.float32)
        bias = (rng.standard_normal(case["E"], np.float32) * np.float32(0.05)) if preset == "deepseek_v3" else None
        routers = {"argosy": ArgosyRouter(preset, case, logits, bias)}
        for name, compiled in (("torch eager", False), ("torch.compile", True)):
            routers[name] = TorchRouter(preset, case, logits, bias, compiled)
        agreed = {}
        for name in list(routers):
            try:
                agreed[name] = check(routers[name], preset, case, logits, bias)
            except Exception as problem:  # whatever a library raises is its answer
                skipped[f"{name}, router {preset}"] = str(problem).splitlines()[0][:160]
                routers.pop(name)
        results += timed(preset, case, routers, agreed, seconds)
    return results


def timed(preset, case, routers, agreed, seconds):
    times = {name: [] for name in routers}
    deadline = time.monotonic() + seconds * len(routers)
    while time.monotonic() < deadline or min(map(len, times.values())) < 5:
        for name, router in routers.items():
            for is_timed in (False, True):  # the first call finds the caches as another left them
                begin = time.perf_counter()
                router.run()
                if is_timed:
                    times[name].append((time.perf_counter() - begin) / NUM_TOKENS * 1e9)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [{"case": preset, "router": name, "median_ns": medians[name], "min_ns": min(times[name]),
             "max_ns": max(times[name]), "calls": len(times[name]), "agreed": agreed[name],
             "ratio": medians[name] / medians["argosy"] if "argosy" in medians else None,
             "goal": case["goals"].get(name)} for name in routers]
