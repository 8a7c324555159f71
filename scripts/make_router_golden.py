#!/usr/bin/env python3
"""Makes testdata/router/ with PyTorch: make_router_golden.py TARGET (usually testdata/router).

Routings, losses and autograd gradients in fp64, for every score function x normalisation x K, with and without
selection bias and group limit; losses with masks and sequences; and the whole chain from hidden states. Written the
way public systems write it (topk, gather, divide), so that nothing of Argosy's own formulas is in it. The same torch
gives the same files; tests/router/golden_test.cc reads them. Needs torch; the tests do not.
"""
import json
import pathlib
import struct
import sys

import torch
import torch.nn.functional as F

EXPERTS, TOKENS, HIDDEN, GROUPS, KEPT_GROUPS = 12, 6, 16, 4, 2
FUNCTIONS = ("softmax", "softmax_top_k", "sigmoid", "sqrt_softplus")
NORMS = ("no", "exact", "reference")
TOP_KS = (1, 2, 4)
FACTOR = 2.5
ALIGNMENT = 64
DTYPES = {torch.float64: ("F64", 8), torch.float32: ("F32", 4), torch.int32: ("I32", 4), torch.uint8: ("U8", 1)}


def write(path, tensors, metadata):
    """Wide types first, then by name: every tensor starts at a multiple of its element size."""
    names = sorted(tensors, key=lambda name: (-DTYPES[tensors[name].dtype][1], name))
    header, data, offset = {"__metadata__": {"cases": json.dumps(metadata, separators=(",", ":"))}}, [], 0
    for name in names:
        tensor = tensors[name].detach().contiguous()
        blob = tensor.numpy().tobytes()
        header[name] = {"dtype": DTYPES[tensor.dtype][0], "shape": list(tensor.shape),
                        "data_offsets": [offset, offset + len(blob)]}
        data.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data))


def scores_of(function, logits):
    if function == "softmax":
        return torch.softmax(logits, dim=-1)
    if function == "sigmoid":
        return torch.sigmoid(logits)
    if function == "sqrt_softplus":
        return torch.sqrt(F.softplus(logits, threshold=1000.0))
    return logits


def choose(selection, top_k, grouped):
    if grouped:
        groups = selection.view(len(selection), GROUPS, -1)
        kept = groups.max(dim=-1).values.topk(KEPT_GROUPS, dim=-1).indices
        refused = torch.ones(len(selection), GROUPS, dtype=torch.bool).scatter(1, kept, False)
        selection = groups.masked_fill(refused.unsqueeze(-1), -torch.inf).flatten(1)
    return selection.topk(top_k, dim=-1).indices


def route(logits, case, bias):
    scores = scores_of(case["function"], logits)
    selection = scores.detach() + (bias if bias is not None else 0.0)
    experts = choose(selection, case["top_k"], case["grouped"])
    weights = scores.gather(1, experts)
    if case["function"] == "softmax_top_k":
        weights = torch.softmax(weights, dim=-1)
    elif case["norm"] != "no":
        single = case["top_k"] == 1 and case["function"] != "softmax" and not case["single"]
        if not single:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + (1e-20 if case["norm"] == "reference" else 0.0))
    return experts, weights * FACTOR


def aux_loss(logits, case, experts, mask, sequence, huggingface=False):
    """Mean over sequences of E/(K T^2) sum_i n_i sum_t score(t, i)."""
    if case["function"].startswith("softmax"):
        scores = torch.softmax(logits, dim=-1)
    else:
        scores = scores_of(case["function"], logits)
        scores = scores / scores.sum(dim=-1, keepdim=True)
    losses = []
    for index in range(int(sequence.max()) + 1):
        here = mask.bool() & (sequence == index)
        tokens = int(here.sum())
        if tokens == 0:
            continue
        load = F.one_hot(experts[here], EXPERTS).sum(dim=(0, 1)).double()
        fraction = load / tokens if huggingface else load / (tokens * case["top_k"])
        losses.append(EXPERTS * (fraction * scores[here].mean(dim=0)).sum())
    return torch.stack(losses).mean()


def z_loss(logits, mask):
    return torch.logsumexp(logits[mask.bool()], dim=-1).square().mean()


def gradient(loss, leaf):
    return torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)[0]


def or_zero(value, leaf):
    return torch.zeros_like(leaf) if value is None else value


def make_case(case, spread):
    logits32 = torch.randn(TOKENS, EXPERTS) * spread
    bias32 = torch.randn(EXPERTS) * 0.3 if case["bias"] else None
    d_weights = torch.randn(TOKENS, case["top_k"])
    mask = torch.tensor([1, 1, 0, 1, 1, 1], dtype=torch.uint8)
    sequence = torch.tensor([0, 1, 1, 1, 0, 0], dtype=torch.int32)
    logits = logits32.double().requires_grad_()
    experts, weights = route(logits, case, bias32.double() if case["bias"] else None)
    routed = (weights * d_weights.double())[mask.bool()].sum()
    aux = aux_loss(logits, case, experts, mask, sequence, case["huggingface"])
    z = z_loss(logits, mask)
    tensors = {"logits": logits32, "d_weights": d_weights, "mask": mask, "sequence": sequence,
               "experts": experts.int(), "weights": weights,
               "d_logits": or_zero(gradient(routed, logits), logits),
               "aux": aux.reshape(1), "d_aux": gradient(aux, logits), "z": z.reshape(1), "d_z": gradient(z, logits)}
    if case["bias"]:
        tensors["bias"] = bias32
    return tensors


def make_layer():
    """From hidden states to one loss, and back to hidden states, gate and gate bias."""
    case = {"function": "sigmoid", "norm": "exact", "top_k": 4, "grouped": False, "single": True}
    hidden32, gate32, bias32 = torch.randn(40, HIDDEN), torch.randn(EXPERTS, HIDDEN) * 0.3, torch.randn(EXPERTS) * 0.1
    d_weights = torch.randn(40, 4)
    mask, sequence = torch.ones(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.int32)
    mask[7] = mask[39] = 0
    hidden, gate, bias = (t.double().requires_grad_() for t in (hidden32, gate32, bias32))
    logits = F.linear(hidden, gate, bias)
    experts, weights = route(logits, case, None)
    aux, z = aux_loss(logits, case, experts, mask, sequence), z_loss(logits, mask)
    loss = (weights * d_weights.double())[mask.bool()].sum() + 0.5 * aux + 0.25 * z
    d_hidden, d_gate, d_bias = torch.autograd.grad(loss, (hidden, gate, bias))
    return {"hidden": hidden32, "gate": gate32, "gate_bias": bias32, "d_weights": d_weights, "mask": mask,
            "experts": experts.int(), "d_hidden": d_hidden, "d_gate": d_gate, "d_gate_bias": d_bias}


def cases_of(function):
    for norm in NORMS:
        for top_k in TOP_KS:
            for limited in (False, True):
                yield {"function": function, "norm": norm, "top_k": top_k, "bias": limited, "grouped": limited,
                       "single": limited, "huggingface": top_k == 4}


def main():
    if len(sys.argv) != 2:
        sys.exit("usage: make_router_golden.py TARGET")
    target = pathlib.Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(20240601)
    for function in FUNCTIONS:
        tensors, cases = {}, []
        for index, case in enumerate(cases_of(function)):
            spread = (0.5, 2.0, 6.0)[index % 3]
            cases.append(case)
            tensors |= {f"{index}.{name}": tensor for name, tensor in make_case(case, spread).items()}
        write(target / f"{function}.safetensors", tensors, cases)
    write(target / "gate.safetensors", make_layer(), [])


if __name__ == "__main__":
    main()
