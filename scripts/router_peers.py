#!/usr/bin/env python3
"""Holds `argosy route` against the router modules of transformers and a model of Transformer Engine's formulas.

    router_peers.py ARGOSY [--tokens 10000] [--extract FILE]

Draws random logits for each module, every second token with two experts close to a tie, hands them to the module bit for bit (its gate is the identity), computes the fp64
truth in numpy, runs `argosy route --compare`, and prints the table of docs/routing.md: whether experts are those of the
truth wherever its gap exceeds fp32 rounding, and how far the weights of both are from it. Exits 1 when Argosy's experts
are not. --extract writes some tokens of each module as the golden file testdata/router/modules.safetensors; the tests
read that and need none of what this script needs: numpy, safetensors, torch, transformers.
"""
import argparse
import dataclasses
import importlib
import json
import pathlib
import subprocess
import sys
import tempfile
import types

import numpy as np
import safetensors.numpy
import torch
import transformers

# Scores are rounded to fp32, the bias is added in fp32, two experts (or groups) are compared: what fp32 may not tell
# apart, relative to the largest term.
ROUNDING = 2.0**-22
SEED = 20240611


@dataclasses.dataclass
class Case:
    name: str
    experts: int
    top_k: int
    preset: str
    score: str
    normalise: bool = False
    bias: bool = False
    groups: int = 1
    keep: int = 1
    group_score: str = "max"
    factor: float = 1.0
    reference_norm: bool = False
    module: str = ""  # of transformers; empty: Transformer Engine's formulas


CASES = [
    Case("mixtral", 8, 2, "mixtral", "softmax", True, module="mixtral.MixtralTopKRouter"),
    Case("qwen2_moe", 60, 4, "qwen2_moe", "softmax", module="qwen2_moe.Qwen2MoeTopKRouter"),
    Case("qwen3_moe", 128, 8, "qwen3_moe", "softmax", True, module="qwen3_moe.Qwen3MoeTopKRouter"),
    Case("olmoe", 64, 8, "olmoe", "softmax", module="olmoe.OlmoeTopKRouter"),
    Case("deepseek_v2", 160, 6, "deepseek_v2", "softmax", groups=8, keep=3, factor=16.0,
         module="deepseek_v2.DeepseekV2TopkRouter"),
    Case("deepseek_v3", 256, 8, "deepseek_v3", "sigmoid", True, True, 8, 4, "sum_of_best_two", 2.5,
         module="deepseek_v3.DeepseekV3TopkRouter"),
    Case("gpt_oss", 128, 4, "gpt_oss", "softmax_top_k", True, module="gpt_oss.GptOssTopKRouter"),
    Case("te_softmax_pre", 64, 8, "softmax_pre", "softmax", factor=2.0),
    Case("te_softmax_post", 64, 8, "softmax_post", "softmax_top_k", True, factor=2.0),
    Case("te_sigmoid", 64, 8, "sigmoid", "sigmoid", True, True, 8, 4, "sum_of_best_k_per_group", 2.5, True),
    Case("te_sqrt_softplus", 64, 8, "sqrt_softplus", "sqrt_softplus", True, True, factor=2.5, reference_norm=True),
]
# Small enough to keep, with every rule of the large ones.
EXTRACT_EXPERTS = {"qwen2_moe": 20, "qwen3_moe": 32, "olmoe": 16, "deepseek_v2": 40, "deepseek_v3": 32, "gpt_oss": 32}
EXTRACT_TOKENS = 24


def scores_of(case, logits):
    """In the precision of `logits`."""
    one = logits.dtype.type(1)
    if case.score == "sigmoid":
        return one / (one + np.exp(-logits))
    if case.score == "sqrt_softplus":
        return np.sqrt(np.log1p(np.exp(-np.abs(logits))) + np.maximum(logits, 0))
    if case.score == "softmax":
        terms = np.exp(logits - logits.max(-1, keepdims=True))
        return terms / terms.sum(-1, keepdims=True)
    return logits


def best(values, count):
    return np.argsort(-values, axis=-1, kind="stable")[..., :count]


def group_scores(case, selection):
    grouped = -np.sort(-selection.reshape(len(selection), case.groups, -1), axis=-1)
    take = {"max": 1, "sum_of_best_two": 2, "sum_of_best_k_per_group": max(1, case.top_k // case.keep)}[case.group_score]
    return grouped[..., :take].sum(-1)


def choose(case, selection):
    """Ids [T, K], and the smallest relative gap of a token's choices."""
    gap = np.full(len(selection), np.inf)

    def narrow(values, kept, gap):
        ordered = -np.sort(-values, axis=-1)
        if ordered.shape[-1] == kept:
            return gap
        a, b = ordered[:, kept - 1], ordered[:, kept]
        scale = np.maximum(np.maximum(np.abs(a), np.abs(b)), 1 if case.bias else 2.0**-126)
        with np.errstate(invalid="ignore"):
            here = np.where(np.isfinite(b), (a - b) / scale, np.inf)
        return np.minimum(gap, here)

    if case.groups > 1:
        of_groups = group_scores(case, selection)
        gap = narrow(of_groups, case.keep, gap)
        kept = np.zeros_like(of_groups, dtype=bool)
        np.put_along_axis(kept, best(of_groups, case.keep), True, axis=-1)
        selection = np.where(np.repeat(kept, case.experts // case.groups, axis=-1), selection, -np.inf)
    return best(selection, case.top_k), narrow(selection, case.top_k, gap)


def weights_of(case, scores, ids):
    weights = np.take_along_axis(scores, ids, axis=-1)
    if case.score == "softmax_top_k":
        terms = np.exp(weights - weights.max(-1, keepdims=True))
        weights = terms / terms.sum(-1, keepdims=True)
    elif case.normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + weights.dtype.type(1e-20 if case.reference_norm else 0))
    return weights * weights.dtype.type(case.factor)


def truth(case, logits, bias):
    scores = scores_of(case, logits.astype(np.float64))
    ids, gap = choose(case, scores + bias.astype(np.float64))
    return ids, weights_of(case, scores, ids), gap, scores


def from_transformers(case, logits, bias):
    package, name = case.module.split(".")
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    config = types.SimpleNamespace(
        num_experts_per_tok=case.top_k, num_local_experts=case.experts, num_experts=case.experts,
        n_routed_experts=case.experts, hidden_size=case.experts, norm_topk_prob=case.normalise,
        routed_scaling_factor=case.factor, n_group=case.groups, topk_group=case.keep,
        topk_method="group_limited_greedy" if case.groups > 1 else "greedy")
    router = getattr(module, name)(config)
    with torch.no_grad():
        router.weight.copy_(torch.eye(case.experts))
        if case.bias:
            router.e_score_correction_bias.copy_(torch.from_numpy(bias))
        seen, weights, ids = router(torch.from_numpy(logits))
    if not np.array_equal(seen.numpy(), logits):
        sys.exit(f"{case.name}: the module did not see the logits")
    return ids.numpy(), weights.float().numpy()


def from_transformer_engine(case, logits, bias):
    """Its formulas in fp32, with the unbiased score recovered by subtraction."""
    scores = scores_of(case, logits)
    biased = scores + bias
    ids, _ = choose(case, biased)
    return ids, weights_of(case, biased - bias if case.bias else scores, ids)


def errors(case, ids, weights, true_ids, gap, true_scores):
    """Tokens whose experts are others although the gap is clear, and the weights' largest relative error."""
    same = (np.sort(ids, -1) == np.sort(true_ids, -1)).all(-1)
    differ = ~same & (gap > ROUNDING)
    expected = weights_of(case, true_scores[same], ids[same])
    return int(differ.sum()), float(np.max(np.abs(weights[same] - expected) / expected))


def route(argosy, case, logits, bias, ids, weights):
    with tempfile.TemporaryDirectory() as folder:
        file, out = pathlib.Path(folder, "in.safetensors"), pathlib.Path(folder, "out.safetensors")
        safetensors.numpy.save_file({"logits": logits, "bias": bias, "peer.topk_idx": ids.astype(np.int32),
                                     "peer.topk_weights": np.ascontiguousarray(weights, np.float32)}, file)
        words = [argosy, "route", "--logits", f"{file}:logits", "--preset", case.preset, "--experts", case.experts,
                 "--top-k", case.top_k, "--routed-scaling-factor", case.factor, "--groups", case.groups,
                 "--keep-groups", case.keep, "--compare", f"{file}:peer", "--json", "-", "--output", out]
        if case.groups > 1:
            words += ["--group-score", case.group_score]
        if case.score != "softmax_top_k":
            words += ["--normalise", "yes" if case.normalise else "no"]
        if case.reference_norm:
            words += ["--weight-norm", "reference"]
        if case.bias:
            words += ["--use-selection-bias", "yes", "--selection-bias", f"{file}:bias"]
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
        if done.returncode not in (0, 1):
            sys.exit(f"{case.name}: {done.stderr}")
        tensors = safetensors.numpy.load_file(out)
        return json.loads(done.stdout)["compare"], tensors["topk_idx"], tensors["topk_weights"]


def draw(case, tokens):
    random = np.random.default_rng([SEED, case.experts, case.top_k])
    logits = (1.5 * random.standard_normal((tokens, case.experts))).astype(np.float32)
    bias = (0.1 * random.standard_normal(case.experts)).astype(np.float32) if case.bias else np.zeros(
        case.experts, np.float32)
    return near_ties(case, logits, bias, random), bias


def near_ties(case, logits, bias, random):
    """In every second token the first refused expert comes to within 2^-26 to 2^-16 of the last chosen one."""
    wide = logits.astype(np.float64)
    selection = scores_of(case, wide) + bias
    order = best(selection, case.top_k + 1)
    rows = np.arange(0, len(logits), 2)
    last, refused = order[rows, case.top_k - 1], order[rows, case.top_k]
    target = selection[rows, last] * (1 - 2.0**random.uniform(-26, -16, len(rows))) - bias[refused]
    if case.score == "softmax":  # the sum hardly changes
        value = wide[rows, last] + np.log(target / scores_of(case, wide)[rows, last])
    elif case.score == "softmax_top_k":
        value = target
    else:
        fits = (target > 0) & (target < (1 if case.score == "sigmoid" else np.inf))
        rows, refused, target = rows[fits], refused[fits], target[fits]
        value = np.log(target / (1 - target)) if case.score == "sigmoid" else np.log(np.expm1(target**2))
    logits[rows, refused] = value
    return logits


def peer_of(case):
    return from_transformers if case.module else from_transformer_engine


def extract(path):
    tensors = {}
    for case in CASES:
        small = dataclasses.replace(case, experts=EXTRACT_EXPERTS.get(case.name, case.experts))
        if not small.module:
            continue
        logits, bias = draw(small, 2 * EXTRACT_TOKENS)
        _, _, gap, _ = truth(small, logits, bias)
        logits = np.ascontiguousarray(logits[gap > 2 * ROUNDING][:EXTRACT_TOKENS])
        ids, weights = peer_of(small)(small, logits, bias)
        tensors |= {f"{case.name}.logits": logits, f"{case.name}.topk_idx": ids.astype(np.int32),
                    f"{case.name}.topk_weights": weights.astype(np.float32)}
        if small.bias:
            tensors[f"{case.name}.selection_bias"] = bias
    safetensors.numpy.save_file(tensors, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("argosy")
    parser.add_argument("--tokens", type=int, default=10000)
    parser.add_argument("--extract")
    args = parser.parse_args()
    if args.extract:
        extract(args.extract)
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, numpy {np.__version__}, "
          f"{args.tokens} tokens\n")
    print("| module | E, K | gap at most 2^-22 | other experts: Argosy | module | weight error: Argosy | module | "
          "equal, differ, ties |")
    print("|---|---|---|---|---|---|---|---|")
    failed = False
    for case in CASES:
        logits, bias = draw(case, args.tokens)
        true_ids, _, gap, true_scores = truth(case, logits, bias)
        ids, weights = peer_of(case)(case, logits, bias)
        compare, our_ids, our_weights = route(args.argosy, case, logits, bias, ids, weights)
        ours, our_error = errors(case, our_ids, our_weights, true_ids, gap, true_scores)
        theirs, their_error = errors(case, ids, weights, true_ids, gap, true_scores)
        failed |= ours > 0
        print(f"| `{case.name}` | {case.experts}, {case.top_k} | {(gap <= ROUNDING).sum()} | {ours} | {theirs} | "
              f"{our_error:.1e} | {their_error:.1e} | {compare['experts_equal']}, {compare['experts_differ']}, "
              f"{compare['ties']} |")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
