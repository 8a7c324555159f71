"""scripts/perf_report renders what is kept, marks what is not, and the folder in the tree is up to date."""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
import xml.etree.ElementTree

ROOT = pathlib.Path(sys.argv.pop()) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]


def run(*words):
    done = subprocess.run([sys.executable, ROOT / "scripts/perf_report", *map(str, words)], text=True,
                          capture_output=True, check=False)
    return done.returncode, done.stdout, done.stderr


def case(name, limit, goal, **params):
    return {"name": name, "params": params, "limit": limit,
            "goals": {"amx": goal, "avx512_bf16": goal, "fma": goal}}


def result(one, median, limit):
    return {"name": one["name"], "params": one["params"], "median_seconds": median,
            "min_seconds": median * 0.9, "max_seconds": median * 1.2, "limit": one["limit"],
            "limit_seconds": limit, "reached": limit / median}


def kept():
    memory = {"read_bytes_per_second": 30e9, "copy_bytes_per_second": 11e9,
              "streaming_copy_bytes_per_second": 20e9}
    peaks = [{"level": level, "one_thread_operations_per_second": rate}
             for level, rate in (("avx2", 1e11), ("avx512_bf16", 2.32e11))]
    hot = case("gemm_hot", "bf16 peak", 0.88, rows=256, N=2048, K=2048, threads=1)
    decode = case("layer_decode", "floor", 0.95, T=8, E=32, K=4, H=2048, F=1024, threads=1)
    return {"level": "avx512_bf16", "limit_level": "avx512_bf16",
            "info": {"cpu": {"model": "Some CPU"}, "cores": 2,
                     "measured": {"bf16_peak": "avx512_bf16", "peaks": peaks, "one_thread": memory,
                                  "all_threads": memory}},
            "cases": [hot, decode],
            "results": [result(hot, 10e-3, 9e-3), result(decode, 8e-3, 7e-3)]}


class PerfReportTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="argosy_perf_")
        self.addCleanup(self.folder.cleanup)
        self.docs = pathlib.Path(self.folder.name) / "perf"
        shutil.copytree(ROOT / "docs/perf", self.docs)
        shutil.rmtree(self.docs / "results", ignore_errors=True)
        (self.docs / "results").mkdir()

    def page(self, name):
        return (self.docs / name).read_text(encoding="utf-8")

    def keep(self, kind, content):
        (self.docs / "results" / f"{kind}.json").write_text(json.dumps(content), encoding="utf-8")

    def test_the_tree_is_up_to_date(self):
        self.assertEqual(run("--check")[:2], (0, ""))

    def test_tables_hold_the_numbers_and_verdicts(self):
        self.keep("avx512_bf16", kept())
        self.assertEqual(run("--render", "--docs", self.docs)[0], 0)
        self.assertIn("| avx512_bf16 (avx512_bf16) | rows 256, N 2048, K 2048, threads 1 | 10 ms | 9 ms to 12 ms "
                      "| 9 ms | 90.0 % | 88.0 %, met |", self.page("gemm.md"))
        self.assertIn("| 87.5 % | 95.0 %, below |", self.page("layer.md"))
        self.assertIn("| avx512_bf16 | Some CPU | 2 | 232 | 30.0 / 30.0 | 11.0 / 11.0 | 20.0 / 20.0 |",
                      self.page("README.md"))

    def test_cores_of_a_kind_stand_one_after_the_other(self):
        self.keep("avx512_bf16_zen5", kept())
        self.keep("avx512_bf16_zen4", kept() | {"level": "avx512"})
        self.assertEqual(run("--render", "--docs", self.docs)[0], 0)
        lines = [line for line in self.page("gemm.md").split("\n") if "rows 256" in line and "zen" in line]
        self.assertEqual([line.split(" | ")[0] for line in lines],
                         ["| avx512_bf16_zen4 (avx512)", "| avx512_bf16_zen5 (avx512_bf16)"])
        self.assertNotIn("| avx512_bf16 | unmeasured", self.page("gemm.md"))
        self.assertIn("avx512_bf16_zen5", self.page("roofline.svg"))

    def test_kinds_without_results_are_unmeasured(self):
        run("--render", "--docs", self.docs)
        for kind in ("amx", "avx512_bf16", "fma"):
            self.assertIn(f"| {kind} | unmeasured |", self.page("gemm.md"))

    def test_picture_is_svg_with_a_point_per_product(self):
        self.keep("avx512_bf16", kept())
        run("--render", "--docs", self.docs)
        tree = xml.etree.ElementTree.parse(self.docs / "roofline.svg")
        titles = [node.text for node in tree.iter("{http://www.w3.org/2000/svg}title")]
        self.assertEqual(len(titles), 2)
        # 2 * 256 * 2048 * 2048 operations in 10 ms.
        self.assertIn("214.7 GFLOP/s", titles[0])

    def test_peak_is_that_of_the_level_of_the_limit(self):
        self.keep("fma", kept() | {"level": "avx2", "limit_level": "avx2"})
        run("--render", "--docs", self.docs)
        self.assertIn("| fma | Some CPU | 2 | 100 |", self.page("README.md"))

    def test_check_sees_a_stale_table_and_changes_nothing(self):
        run("--render", "--docs", self.docs)
        self.keep("fma", kept())
        before = self.page("gemm.md")
        code, out, _ = run("--check", "--docs", self.docs)
        self.assertEqual(code, 1)
        self.assertIn("gemm.md: stale", out)
        self.assertEqual(self.page("gemm.md"), before)

    def test_rendering_twice_changes_nothing(self):
        self.keep("amx", kept() | {"limit_level": "amx", "info": kept()["info"] | {"measured": kept()["info"]["measured"] | {
            "peaks": [{"level": "amx", "one_thread_operations_per_second": 3e12}]}}})
        run("--render", "--docs", self.docs)
        self.assertEqual(run("--render", "--docs", self.docs)[:2], (0, ""))


if __name__ == "__main__":
    unittest.main()
