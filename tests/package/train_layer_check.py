"""examples/train_layer, briefly: python3 train_layer_check.py PROGRAM SOURCE_TREE

The loss falls, the load stays even, tokens are dropped only where there is a capacity, ranks and threads change no number, and the
curves kept in docs/training are what the program writes.
"""

import csv
import importlib.machinery
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import xml.etree.ElementTree

PROGRAM, ROOT = sys.argv[1], pathlib.Path(sys.argv[2])
STEPS = 200
TOKENS_CHOICES = 256  # of a step


def load_curves():
    loader = importlib.machinery.SourceFileLoader("loss_curves", str(ROOT / "scripts/loss_curves"))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("loss_curves", loader))
    sys.dont_write_bytecode = True
    loader.exec_module(module)
    return module


def run(folder, data, *options):
    path = pathlib.Path(folder) / "curve.csv"
    subprocess.run([PROGRAM, "--data", data, "--steps", str(STEPS), "--csv", path, *options], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    return path.read_text(encoding="utf-8").splitlines()


def expect(is_true, text):
    if not is_true:
        sys.exit(f"train_layer_check: {text}")


def main():
    curves = load_curves()
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, options) in curves.RUNS.items():
            lines = run(folder, curves.DATA, *options)
            rows = list(csv.DictReader(lines))
            losses = [float(row["loss"]) for row in rows]
            first, last = sum(losses[:4]) / 4, sum(losses[-4:]) / 4
            expect(last < first / 25, f"{name}: loss {first} at first, {last} after {STEPS} steps")
            dropped = sum(int(row["dropped"]) for row in rows)
            if "--capacity" in options:
                expect(0 < dropped < 0.2 * TOKENS_CHOICES * STEPS, f"{name}: {dropped} choices dropped")
            else:
                least = min(float(row["balancedness"]) for row in rows[STEPS // 2:])
                expect(dropped == 0, f"{name}: {dropped} choices dropped")
                expect(least >= 0.65, f"{name}: balancedness falls to {least}")
            kept = (ROOT / f"docs/training/{name}.csv").read_text(encoding="utf-8").splitlines()
            expect(lines == kept[:STEPS + 1], f"docs/training/{name}.csv is stale: run scripts/loss_curves")
            expect(run(folder, curves.DATA, *options, "--ranks", "3", "--threads", "2") == lines,
                   f"{name}: three ranks of two threads give other numbers")
    for name, (title, runs) in curves.PICTURES.items():
        kept = (ROOT / "docs/training" / name).read_text(encoding="utf-8")
        rows = {run_name: curves.read(ROOT / f"docs/training/{run_name}.csv") for run_name in runs}
        expect(kept == curves.picture(title, rows), f"docs/training/{name} is stale: run scripts/loss_curves --draw-only")
        xml.etree.ElementTree.fromstring(kept)
    bad = subprocess.run([PROGRAM, "--data", "nowhere.safetensors:x"], stderr=subprocess.PIPE, text=True, check=False)
    expect(bad.returncode == 1 and "nowhere.safetensors" in bad.stderr, f"no file: {bad}")
    expect(subprocess.run([PROGRAM, "--steps", "0"], stderr=subprocess.DEVNULL, check=False).returncode == 2, "usage")


if __name__ == "__main__":
    main()
