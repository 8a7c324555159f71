"""bench/peers: every script compiles, the report says what the data says. Installs and times nothing."""

import importlib
import pathlib
import subprocess
import sys
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(sys.argv.pop()) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]
PEERS = ROOT / "bench/peers"


def load_report(name="report"):
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(PEERS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def row(peer, count, seconds):
    return {"peer": peer, "T": count, "median_seconds": seconds, "min_seconds": seconds / 2,
            "max_seconds": seconds * 2, "calls": 9, "operations_per_second": 1e11}


def sample():
    return {"cpu": "Some CPU", "cores": 2,
            "shape": {"hidden": 2048, "intermediate": 1024, "num_experts": 32, "top_k": 4},
            "checks": {"argosy": {"T=1": "ok (1.0e-03)", "T=0": "ok (0.0e+00)"},
                       "other": {"T=1": "ok (2.0e-03)", "T=0": "killed by SIGSEGV"}},
            "skipped": {"third": "cannot be installed here"},
            "one_rank": [row("other", 1, 1.0e-3), row("argosy", 1, 1.0e-3), row("other", 64, 1.0e-2),
                         row("argosy", 64, 0.95e-2)],
            "two_ranks": [row("argosy", 64, 0.5e-2), row("other", 64, 2e-2)]}


class PeersTest(unittest.TestCase):
    def test_scripts_compile(self):
        scripts = [PEERS / "run", *sorted(PEERS.glob("*.py"))]
        self.assertGreater(len(scripts), 4)
        for script in scripts:
            compile(script.read_text(encoding="utf-8"), str(script), "exec")

    def test_help_says_where_things_go(self):
        done = subprocess.run([sys.executable, PEERS / "run", "--help"], text=True, capture_output=True, check=False)
        self.assertEqual(done.returncode, 0)
        self.assertIn("--home", done.stdout)

    def test_goals_are_judged_by_the_best_other(self):
        text = load_report().markdown(sample())
        self.assertIn("speed over the best other's: 1.00 (goal 1.00, met)", text)
        self.assertIn("speed over the best other's: 1.05 (goal 1.10, below)", text)
        self.assertIn("speed over the best other's: 4.00 (goal 1.10, met)", text)

    def test_crashes_and_gaps_are_told(self):
        text = load_report().markdown(sample())
        self.assertIn("| other | ok (2.0e-03) | killed by SIGSEGV |", text)
        self.assertIn("- third: cannot be installed here", text)

    def test_without_others_there_is_no_verdict(self):
        data = sample()
        data["one_rank"] = [row("argosy", 8, 1e-3)]
        data["two_ranks"] = []
        self.assertNotIn("best other", load_report().markdown(data))

    def test_quantised_weights_stand_with_their_error(self):
        def result(peer, bits, seconds):
            return {**row(peer, 8, seconds), "bits": bits, "error": 0.031, "rms_error": 0.022}
        data = sample()
        data["quantised"] = {"results": [result("argosy bf16", 16, 4e-3), result("argosy FP8", 8, 2e-3),
                                         result("ggml q8_0", 8, 3e-3), result("argosy MXFP4", 4, 1e-3)],
                             "skipped": {"kt-kernel INT8": "no second core"}}
        text = load_report().markdown(data)
        self.assertIn("| argosy FP8 | 2 ms | 1 ms to 4 ms | 9 | 2.00 | 3.1e-02 | 2.2e-02 |", text)
        self.assertIn("8 bits, Argosy's speed over the best other's: 1.50", text)
        self.assertNotIn("4 bits, Argosy", text)
        self.assertIn("kt-kernel INT8: no second core", text)

    def test_training_steps_stand_by_shape_with_their_errors(self):
        def result(peer, shape, seconds):
            errors = {kind: 0.004 for kind in ("output", "d_hidden", "d_gate", "d_gate_up", "d_down")}
            return {**row(peer, 2048, seconds), "shape": shape, "errors": errors}
        data = {**sample(), "results": [result("other", "E 32", 2.4), result("argosy", "E 32", 2.0),
                                        result("argosy", "E 64", 1.0), result("other", "E 64", 30.0)]}
        report = load_report("train_report")
        text = report.markdown(data)
        self.assertIn("| argosy | 2.000 s | 1.000 to 4.000 s | 9 | 100.0 | 4.0e-03 |", text)
        self.assertIn("speed over the best other's: 1.20 (goal 1.25, below)", text)
        self.assertIn("speed over the best other's: 30.00 (goal 1.25, met)", text)
        self.assertIn("- third: cannot be installed here", text)
        picture = xml.etree.ElementTree.fromstring(report.svg(data))
        bars = [e for e in picture.iter("{http://www.w3.org/2000/svg}rect") if len(e)]
        self.assertEqual(len(bars), 4)

    def test_picture_has_a_bar_per_result(self):
        tree = xml.etree.ElementTree.fromstring(load_report().svg(sample()))
        titles = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}title")]
        self.assertEqual(len(titles), 4)
        self.assertIn("argosy, T=64: 9.5 ms", titles)


if __name__ == "__main__":
    unittest.main()
