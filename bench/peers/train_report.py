"""training.json as a table (training.md) and a picture (training.svg)."""

import report

GOAL = 1.25  # Argosy's speed over the best other's
KINDS = ["output", "d_hidden", "d_gate", "d_gate_up", "d_down"]


def by_shape(data):
    shapes = dict.fromkeys(r["shape"] for r in data["results"])
    return {shape: sorted((r for r in data["results"] if r["shape"] == shape), key=lambda r: r["median_seconds"])
            for shape in shapes}


def verdict(rows):
    own = [r["median_seconds"] for r in rows if r["peer"] == "argosy"]
    others = [r["median_seconds"] for r in rows if r["peer"] != "argosy"]
    if not own or not others:
        return ""
    speed = min(others) / own[0]
    return f"Argosy's speed over the best other's: {speed:.2f} (goal {GOAL:.2f}, {'met' if speed >= GOAL else 'below'})"


def tables(data):
    lines = []
    for shape, rows in by_shape(data).items():
        lines += [f"### {shape}", "",
                  "| implementation | median | min to max | steps | GFLOP/s | " + " | ".join(KINDS) + " |",
                  "| --- " * (5 + len(KINDS)) + "|"]
        for r in rows:
            errors = " | ".join(f"{r['errors'][kind]:.1e}" for kind in KINDS)
            lines.append(f"| {r['peer']} | {r['median_seconds']:.3f} s | {r['min_seconds']:.3f} to "
                         f"{r['max_seconds']:.3f} s | {r['calls']} | {r['operations_per_second'] / 1e9:.1f} | {errors} |")
        lines += ["", verdict(rows), ""]
    return lines


def markdown(data):
    lines = [f"# Training step on {data['cpu']}", "",
             "The MoE layer with its router, T = 2048, bf16, one thread: forward and backward with all "
             "gradients, implementations in turn in one run. Errors of the first step against fp64, by the largest value.",
             "", *tables(data)]
    return "\n".join(lines + report.checks_table(data) + report.left_out(data)) + "\n"


def svg(data):
    return report.bars("Time of a training step over Argosy's, one thread (lower is faster)", by_shape(data))
