"""Inputs of a training step and its gradients in float64. Arrays of bfloat16 are uint16 bit patterns.

The layer has its router: softmax over all experts, the top_k largest, weights scaled to sum 1 (Mixtral).
Test: train.py holds every implementation, Argosy among them, against `reference` before it times anything.
"""

import dataclasses
import pathlib

import numpy as np

import layer_data
from layer_data import Shape, normal_bits, to_bits, to_float
from train_report import KINDS

TOKENS = 2048
SHAPES = [Shape(hidden=2048, intermediate=1024, num_experts=32, top_k=4),
          Shape(hidden=1024, intermediate=512, num_experts=64, top_k=8)]
SMALL = layer_data.SMALL
LEAST_GAP = 1e-4  # between a token's last chosen logit and the next: every fp32 router chooses alike
CHECKED_EXPERTS = 2  # of a full-size layer: those with the most and the fewest tokens


def shape_name(shape):
    return f"E {shape.num_experts}, K {shape.top_k}, H {shape.hidden}, F {shape.intermediate}"


def operations(shape):
    """Three products of every expert row forward, six backward."""
    return 18 * TOKENS * shape.top_k * shape.hidden * shape.intermediate


@dataclasses.dataclass
class Inputs:
    gate: np.ndarray  # [E, H]
    gate_up: np.ndarray  # [E, 2F, H], gate rows first
    down: np.ndarray  # [E, H, F]
    x: np.ndarray  # [T, H]
    d_output: np.ndarray  # [T, H]


def logits_of(x, gate):
    return to_float(x).astype(np.float64) @ to_float(gate).astype(np.float64).T


def make_inputs(num_tokens, shape, seed, closed=()):
    """No token goes to the experts `closed`: element 0 of every row is 1, and there their gate is -64."""
    rng = np.random.default_rng(seed)
    gate = normal_bits(rng, (shape.num_experts, shape.hidden), shape.hidden ** -0.5)
    gate[list(closed), 0] = to_bits(np.float32(-64))
    gate_up, down = layer_data.make_weights(shape, seed + 1)
    x = normal_bits(rng, (num_tokens, shape.hidden), 1.0)
    x[:, 0] = to_bits(np.float32(1))
    while True:
        order = np.sort(logits_of(x, gate), axis=1)
        close = order[:, -shape.top_k] - order[:, -shape.top_k - 1] < LEAST_GAP
        if not close.any():
            break
        x[close, 1:] = normal_bits(rng, (int(close.sum()), shape.hidden - 1), 1.0)
    return Inputs(gate, gate_up, down, x, normal_bits(rng, x.shape, 1.0))


def choose(logits, top_k):
    """Experts [T, K], most wanted first, and their weights."""
    experts = np.argsort(-logits, axis=1)[:, :top_k]
    chosen = np.take_along_axis(logits, experts, axis=1)
    weights = np.exp(chosen - chosen.max(axis=1, initial=-np.inf, keepdims=True))
    return experts, weights / weights.sum(axis=1, keepdims=True)


def reference(inputs, top_k, checked):
    """KINDS -> float64; gradients of expert weights only of the experts `checked`, in this order."""
    x, d_output = (to_float(bits).astype(np.float64) for bits in (inputs.x, inputs.d_output))
    gate = to_float(inputs.gate).astype(np.float64)
    logits = x @ gate.T
    experts, weights = choose(logits, top_k)
    out, d_x, d_weights = np.zeros_like(x), np.zeros_like(x), np.zeros_like(weights)
    d_gate_up, d_down = {}, {}
    width = inputs.down.shape[2]
    for expert in range(len(gate)):
        token, place = np.nonzero(experts == expert)
        wide, tall = (to_float(part[expert]).astype(np.float64) for part in (inputs.gate_up, inputs.down))
        product = x[token] @ wide.T
        gate_part, up_part = product[:, :width], product[:, width:]
        sigmoid = 1 / (1 + np.exp(-gate_part))
        silu = gate_part * sigmoid
        row = (silu * up_part) @ tall.T
        weight = weights[token, place, None]
        np.add.at(out, token, row * weight)
        d_weights[token, place] = (d_output[token] * row).sum(axis=1)
        d_row = d_output[token] * weight
        d_h = d_row @ tall
        slope = sigmoid * (1 + gate_part * (1 - sigmoid))
        d_product = np.concatenate([d_h * up_part * slope, d_h * silu], axis=1)
        np.add.at(d_x, token, d_product @ wide)
        if expert in checked:
            d_gate_up[expert] = d_product.T @ x[token]
            d_down[expert] = d_row.T @ (silu * up_part)
    d_chosen = weights * (d_weights - (weights * d_weights).sum(axis=1, keepdims=True))
    d_logits = np.zeros_like(logits)
    np.put_along_axis(d_logits, experts, d_chosen, axis=1)
    return {"output": out, "d_hidden": d_x + d_logits @ gate, "d_gate": d_logits.T @ x,
            "d_gate_up": np.stack([d_gate_up[e] for e in checked]),
            "d_down": np.stack([d_down[e] for e in checked])}


def errors_of(got, want):
    """Of every kind: the largest error as a part of the largest value."""
    return {kind: layer_data.relative_error(got[kind].astype(np.float64), want[kind]) for kind in KINDS}


def worst_of(errors):
    """(kind, error) of the largest; NaN is larger than all."""
    return max(errors.items(), key=lambda item: np.inf if np.isnan(item[1]) else item[1])


def check_cases():
    """name -> inputs on SMALL; all experts' gradients are compared."""
    every = range(SMALL.num_experts)
    return {"random": make_inputs(64, SMALL, 11),
            "empty experts": make_inputs(64, SMALL, 12, closed=(0, 3, 7)),
            "one pair": make_inputs(64, SMALL, 13, closed=[e for e in every if e not in (3, 4)]),
            "T=1": make_inputs(1, SMALL, 14),
            "T=0": make_inputs(0, SMALL, 15)}


def save_full(folder, shape):
    """Inputs and reference of a full-size step, once for all workers, which map them."""
    folder = pathlib.Path(folder)
    inputs = make_inputs(TOKENS, shape, 100 + shape.num_experts)
    for field in dataclasses.fields(inputs):
        np.save(folder / f"{field.name}.npy", getattr(inputs, field.name))
    experts, _ = choose(logits_of(inputs.x, inputs.gate), shape.top_k)
    order = np.argsort(np.bincount(experts.flatten(), minlength=shape.num_experts), kind="stable")
    checked = [int(order[-1]), int(order[0])][:CHECKED_EXPERTS]
    np.save(folder / "checked.npy", np.array(checked))
    for kind, values in reference(inputs, shape.top_k, checked).items():
        np.save(folder / f"want_{kind}.npy", values)


def load_full(folder):
    """Inputs, checked experts and reference."""
    names = [field.name for field in dataclasses.fields(Inputs)]
    inputs = Inputs(**{name: layer_data.load(folder, name, writable=True) for name in names})
    want = {kind: layer_data.load(folder, f"want_{kind}") for kind in KINDS}
    return inputs, layer_data.load(folder, "checked").tolist(), want
