"""results.json as a table (results.md) and a picture (results.svg)."""

TOKENS_OF_GOAL = {1: 1.0, 8: 1.0, 64: 1.1, 512: 1.1, 2048: 1.0}  # Argosy's speed over the best other's


def time_text(seconds):
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def by_tokens(results):
    counts = sorted({r["T"] for r in results})
    return {count: sorted((r for r in results if r["T"] == count), key=lambda r: r["median_seconds"])
            for count in counts}


def verdict(rows, count):
    """Argosy against the best of the others."""
    own = [r["median_seconds"] for r in rows if r["peer"] == "argosy"]
    others = [r["median_seconds"] for r in rows if r["peer"] != "argosy"]
    if not own or not others:
        return ""
    speed, goal = min(others) / own[0], TOKENS_OF_GOAL[count]
    return f"Argosy's speed over the best other's: {speed:.2f} (goal {goal:.2f}, {'met' if speed >= goal else 'below'})"


def tables(title, results):
    lines = [f"## {title}", ""]
    for count, rows in by_tokens(results).items():
        lines += [f"### T = {count}", "", "| implementation | median | min to max | calls | GFLOP/s |",
                  "| --- | --- | --- | --- | --- |"]
        for r in rows:
            spread = f"{time_text(r['min_seconds'])} to {time_text(r['max_seconds'])}"
            lines.append(f"| {r['peer']} | {time_text(r['median_seconds'])} | {spread} | {r['calls']} | "
                         f"{r['operations_per_second'] / 1e9:.1f} |")
        lines += ["", verdict(rows, count), ""]
    return lines


def router_tables(results):
    lines = ["## Router", "", "8192 tokens, fp32 logits given.", "",
             "| preset | router | median, ns a token | min to max | calls | Argosy's speed | goal |",
             "| --- | --- | --- | --- | --- | --- | --- |"]
    for r in results:
        goal = "" if r["goal"] is None or r["ratio"] is None else (
            f"{r['goal']} x, {'met' if r['ratio'] >= r['goal'] else 'below'}")
        ratio = "" if r["router"] == "argosy" or r["ratio"] is None else f"{r['ratio']:.1f} x"
        lines.append(f"| {r['case']} | {r['router']} | {r['median_ns']:.0f} | {r['min_ns']:.0f} to {r['max_ns']:.0f} | "
                     f"{r['calls']} | {ratio} | {goal} |")
    return lines + [""]


def quantised_verdict(rows, bits):
    """Argosy's best format of `bits` a weight against the best of the others."""
    same = [r for r in rows if r["bits"] == bits]
    own = [r["median_seconds"] for r in same if r["peer"].startswith("argosy")]
    others = [r["median_seconds"] for r in same if not r["peer"].startswith("argosy")]
    if not own or not others:
        return ""
    return f"{bits} bits, Argosy's speed over the best other's: {min(others) / min(own):.2f}"


def quantised_tables(data):
    lines = ["## Quantised weights, one rank", ""]
    for count, rows in by_tokens(data["results"]).items():
        bf16 = next((r["median_seconds"] for r in rows if r["bits"] == 16), None)
        lines += [f"### Quantised, T = {count}", "",
                  "| implementation | median | min to max | calls | speed over bf16 | max error | rms error |",
                  "| --- | --- | --- | --- | --- | --- | --- |"]
        for r in rows:
            spread = f"{time_text(r['min_seconds'])} to {time_text(r['max_seconds'])}"
            speed = f"{bf16 / r['median_seconds']:.2f}" if bf16 else ""
            lines.append(f"| {r['peer']} | {time_text(r['median_seconds'])} | {spread} | {r['calls']} | {speed} | "
                         f"{r['error']:.1e} | {r['rms_error']:.1e} |")
        lines += ["", "; ".join(filter(None, (quantised_verdict(rows, bits) for bits in (8, 4)))), ""]
    return lines + [f"- left out: {name}: {why}" for name, why in data["skipped"].items()]


def checks_table(data):
    cases = list(next(iter(data["checks"].values()), {}))
    lines = ["## Against fp64, small shapes", "",
             "| implementation | " + " | ".join(cases) + " |", "| --- " * (len(cases) + 1) + "|"]
    for peer, verdicts in data["checks"].items():
        lines.append(f"| {peer} | " + " | ".join(v.replace("|", "/") for v in verdicts.values()) + " |")
    return lines


def left_out(data):
    if not data["skipped"]:
        return []
    return ["", "## Left out", ""] + [f"- {name}: {why}" for name, why in data["skipped"].items()]


def markdown(data):
    shape = data["shape"]
    lines = [f"# MoE layer forward on {data['cpu']}", "",
             f"{shape['num_experts']} experts, top-{shape['top_k']}, H {shape['hidden']}, F {shape['intermediate']}, "
             "bf16 weights; one thread, implementations in turn in one run.", ""]
    lines += tables("One rank", data["one_rank"])
    if data["two_ranks"]:
        lines += tables("Two ranks: the other inside Open MPI's Alltoallv recipe", data["two_ranks"])
    if data.get("routers"):
        lines += router_tables(data["routers"])
    if data.get("quantised"):
        lines += quantised_tables(data["quantised"])
    return "\n".join(lines + checks_table(data) + left_out(data)) + "\n"


def bars(title, groups):
    """A picture: bars of time over Argosy's, for each of `groups`, label -> results."""
    names = sorted({r["peer"] for rows in groups.values() for r in rows}, key=lambda n: (n != "argosy", n))
    colours = dict(zip(names, ["#c0392b", "#1b6ca8", "#4fa3d1", "#7f8c8d", "#2e8b57", "#8e6bbf", "#e08e0b"]))
    bar, gap, left, top, plot = 16, 30, 60, 50, 260
    width = left + sum(gap + max(bar * len(rows), 7 * len(label)) for label, rows in groups.items()) + 230
    most = 4.0  # longer bars are cut and say their number
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {top + plot + 50}" '
           'font-family="sans-serif" font-size="12">',
           f'<rect width="{width}" height="{top + plot + 50}" fill="#ffffff"/>',
           f'<text x="{left}" y="22" font-size="15">{title}</text>']
    for tick in range(int(most) + 1):
        y = top + plot - plot * tick / most
        out.append(f'<line x1="{left}" y1="{y}" x2="{width - 220}" y2="{y}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tick}</text>')
    x = left + gap / 2
    for label, rows in groups.items():
        own = next((r["median_seconds"] for r in rows if r["peer"] == "argosy"), None)
        base = own or min(r["median_seconds"] for r in rows)
        name = label.replace(" = ", "=")
        space = max(bar * len(rows), 7 * len(label))
        middle = x + space / 2
        x += (space - bar * len(rows)) / 2
        for r in rows:
            ratio = r["median_seconds"] / base
            height = plot * min(ratio, most) / most
            out.append(f'<rect x="{x:.0f}" y="{top + plot - height:.1f}" width="{bar - 2}" height="{height:.1f}" '
                       f'fill="{colours[r["peer"]]}"><title>{r["peer"]}, {name}: {time_text(r["median_seconds"])}'
                       f'</title></rect>')
            if ratio > most:
                out.append(f'<text x="{x + 7:.0f}" y="{top - 4}" text-anchor="middle" font-size="9">'
                           f'{ratio:.0f}</text>')
            x += bar
        out.append(f'<text x="{middle:.0f}" y="{top + plot + 18}" text-anchor="middle">{label}</text>')
        x = middle + space / 2 + gap
    for i, name in enumerate(names):
        y = top + 18 * i
        out.append(f'<rect x="{width - 205}" y="{y}" width="12" height="12" fill="{colours[name]}"/>')
        out.append(f'<text x="{width - 188}" y="{y + 10}">{name}</text>')
    return "\n".join(out + ["</svg>"]) + "\n"


def svg(data):
    groups = {f"T = {count}": rows for count, rows in by_tokens(data["one_rank"]).items()}
    return bars("Time over Argosy's, one thread (lower is faster)", groups)
