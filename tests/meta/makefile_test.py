"""What make would do: the demo builds the tool and nothing else, the tests build everything."""

import pathlib
import shutil
import subprocess
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop()) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]


def commands_of(target):
    result = subprocess.run(["make", "--dry-run", "-C", ROOT, target], capture_output=True, text=True, check=True)
    return [line for line in result.stdout.splitlines() if line.startswith(("cmake", "ctest", "scripts/"))]


@unittest.skipUnless(shutil.which("make"), "no make")
class MakefileTest(unittest.TestCase):
    def builds_of(self, target):
        return [line for line in commands_of(target) if line.startswith("cmake --build")]

    def test_build_and_demo_build_the_tool_only(self):
        for target in ["build", "demo", "digests"]:
            with self.subTest(target=target):
                builds = self.builds_of(target)
                self.assertEqual(len(builds), 1)
                self.assertTrue(builds[0].endswith("--target argosy_cli"), builds)

    def test_test_builds_everything_before_it_runs(self):
        builds = self.builds_of("test")
        self.assertEqual(len(builds), 1)
        self.assertNotIn("--target", builds[0])
        self.assertTrue(commands_of("test")[-1].startswith("ctest"))


if __name__ == "__main__":
    unittest.main()
