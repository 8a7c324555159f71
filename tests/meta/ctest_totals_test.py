"""scripts/ctest_totals against a real ctest run: every outcome is counted once, none is lost."""

import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop()) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]

# One test of each outcome that ctest knows.
SUITE = """
add_test(passes "true")
add_test(fails "false")
add_test(inverted "false")
set_tests_properties(inverted PROPERTIES WILL_FAIL TRUE)
add_test(skips "sh" "-c" "exit 77")
set_tests_properties(skips PROPERTIES SKIP_RETURN_CODE 77)
add_test(gtest_skips "echo" "[  SKIPPED ] Some.Test")
set_tests_properties(gtest_skips PROPERTIES SKIP_REGULAR_EXPRESSION "\\\\[  SKIPPED \\\\]")
add_test(hangs "sleep" "20")
set_tests_properties(hangs PROPERTIES TIMEOUT 0.2)
add_test(cannot_start "/no/such/program")
add_test(disabled "true")
set_tests_properties(disabled PROPERTIES DISABLED TRUE)
"""


def totals(*arguments):
    done = subprocess.run([sys.executable, ROOT / "scripts/ctest_totals", *arguments], text=True,
                          capture_output=True, check=False)
    return done.returncode, done.stdout


class CtestTotalsTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="argosy_totals_")
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name)

    def ctest(self, suite):
        (self.root / "CTestTestfile.cmake").write_text(suite)
        result = self.root / "result.xml"
        subprocess.run(["ctest", "--output-junit", result], cwd=self.root, capture_output=True,
                       check=False)
        return str(result)

    def test_every_outcome(self):
        self.assertEqual(totals(self.ctest(SUITE)), (1, "2 passed, 3 failed, 3 skipped\n"))

    def test_suites_add_up(self):
        result = self.ctest('add_test(passes "true")\nadd_test(also "true")\n')
        self.assertEqual(totals(result), (0, "2 passed, 0 failed, 0 skipped\n"))
        self.assertEqual(totals(result, result), (0, "4 passed, 0 failed, 0 skipped\n"))

    def test_failed_steps_count(self):
        result = self.ctest('add_test(passes "true")\n')
        self.assertEqual(totals("--failed-steps", "2", result), (1, "1 passed, 2 failed, 0 skipped\n"))

    def test_nothing_run_is_a_failure(self):
        self.assertEqual(totals(), (1, "0 passed, 0 failed, 0 skipped\n"))
        self.assertEqual(totals(self.ctest("")), (1, "0 passed, 1 failed, 0 skipped\n"))
        missing = str(self.root / "missing.xml")
        self.assertEqual(totals(missing), (1, "0 passed, 1 failed, 0 skipped\n"))
        (self.root / "broken.xml").write_text("<testsuite><testcase")
        self.assertEqual(totals(str(self.root / "broken.xml")), (1, "0 passed, 1 failed, 0 skipped\n"))


if __name__ == "__main__":
    unittest.main()
