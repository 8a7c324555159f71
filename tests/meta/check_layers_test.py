"""scripts/check_layers accepts this tree and reports every kind of break, with file and line.

Each case copies the tree's sources, plants one break, and expects exactly that finding: a checker that
finds nothing, or everything, fails here.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(sys.argv.pop()) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]


def run(root):
    done = subprocess.run([sys.executable, ROOT / "scripts/check_layers", root], text=True,
                          capture_output=True, check=False)
    return done.returncode, done.stdout.splitlines(), done.stderr


class CheckLayersTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="argosy_layers_")
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name).resolve()
        for name in ("src", "include", "tools", "cmake"):
            shutil.copytree(ROOT / name, self.root / name)
        shutil.copy(ROOT / "CMakeLists.txt", self.root)

    def plant(self, path, text):
        """Appends to a file, made with a purpose line if it is new; returns the first new line."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        old = file.read_text() if file.exists() else "// Planted.\n"
        file.write_text(old + text)
        return len(old.splitlines()) + 1

    def expect(self, path, line, words):
        code, found, _ = run(self.root)
        self.assertEqual(code, 1)
        self.assertEqual(len(found), 1, found)
        self.assertTrue(found[0].startswith(f"{path}:{line}: "), found[0])
        for word in words:
            self.assertIn(word, found[0])

    def expect_clean(self):
        self.assertEqual(run(self.root), (0, [], ""))

    def test_this_tree_is_clean(self):
        self.assertEqual(run(ROOT), (0, [], ""))

    def test_copy_is_clean(self):
        self.expect_clean()

    def test_include_up_the_table(self):
        self.plant("src/transport/planted.h", "")
        line = self.plant("src/router/planted.cc", '\n#include "transport/planted.h"\n') + 1
        self.expect("src/router/planted.cc", line, ["router -> transport", "src/transport/planted.h"])

    def test_every_edge_up_is_caught(self):
        order = ["base", "platform", "numeric", "transport", "plan", "exchange", "moe"]
        for low in range(len(order)):
            for high in range(low + 1, len(order)):
                with self.subTest(edge=f"{order[low]} -> {order[high]}"):
                    self.plant(f"src/{order[high]}/planted_target.h", "")
                    source = f"src/{order[low]}/planted_edge.cc"
                    line = self.plant(source, f'#include "{order[high]}/planted_target.h"\n')
                    self.expect(source, line, [f"{order[low]} -> {order[high]}"])
                    (self.root / source).unlink()

    def test_edges_down_are_allowed(self):
        self.plant("src/base/planted.h", '#include "argosy/status.h"\n')
        self.plant("src/plan/planted.h", '#include "base/planted.h"\n')
        self.plant("src/moe/planted.cc", '#include <vector>\n#include "plan/planted.h"\n')
        self.expect_clean()

    def test_relative_include_is_no_way_around(self):
        self.plant("src/moe/planted.h", "")
        line = self.plant("src/gemm/planted.cc", '#  include   "../moe/planted.h"\n')
        self.expect("src/gemm/planted.cc", line, ["gemm -> moe"])

    def test_public_header_with_an_internal_include(self):
        line = self.plant("include/argosy/planted.h", '#include "base/error.h"\n')
        self.expect("include/argosy/planted.h", line, ["public header", "src/base/error.h"])

    def test_tool_with_an_internal_include(self):
        line = self.plant("tools/planted.cc", '#include "argosy/status.h"\n#include "base/error.h"\n')
        self.expect("tools/planted.cc", line + 1, ["tools -> base"])

    def test_tool_with_its_own_include(self):
        self.plant("tools/planted.h", "")
        self.plant("tools/planted.cc", '#include "tools/planted.h"\n')
        self.expect_clean()
        line = self.plant("src/moe/planted.cc", '#include "tools/planted.h"\n')
        self.expect("src/moe/planted.cc", line, ["moe -> tools"])

    def test_area_outside_the_table(self):
        line = self.plant("src/extra/planted.cc", '#include "base/error.h"\n')
        self.expect("src/extra/planted.cc", line, ["extra", "not in the table"])

    def test_include_of_nothing(self):
        line = self.plant("src/plan/planted.cc", '#include "plan/no_such_file.h"\n')
        self.expect("src/plan/planted.cc", line, ["no_such_file.h"])

    def test_system_calls_outside_platform(self):
        self.plant("src/platform/planted.cc", "#include <sys/mman.h>\n")
        self.expect_clean()
        line = self.plant("src/exchange/planted.cc", "#include <sys/mman.h>\n")
        self.expect("src/exchange/planted.cc", line, ["<sys/mman.h>", "src/platform"])

    def test_file_sizes(self):
        self.plant("include/argosy/planted.h", "\n" * 299)
        self.plant("src/plan/planted.cc", "\n" * 599)
        self.expect_clean()
        self.plant("include/argosy/planted.h", "\n")
        self.expect("include/argosy/planted.h", 1, ["301 lines", "300"])
        (self.root / "include/argosy/planted.h").unlink()
        self.plant("src/plan/planted.cc", "\n")
        self.expect("src/plan/planted.cc", 1, ["601 lines", "600"])

    def test_file_without_a_purpose(self):
        (self.root / "src/plan/planted.cc").write_text("int planted;\n")
        self.expect("src/plan/planted.cc", 1, ["purpose"])

    def test_banned_calls(self):
        for code in ("auto v = std::getenv(name);", "throw 1;", "std::cerr << 1;", 'printf("x");',
                     "std::fprintf(stderr, text);", 'fmt::print("x");', "puts(text);"):
            with self.subTest(code=code):
                line = self.plant("src/plan/planted.cc", f"\n{code}\n") + 1
                self.expect("src/plan/planted.cc", line, [])
                (self.root / "src/plan/planted.cc").unlink()

    def test_words_in_comments_and_strings_are_free(self):
        self.plant("src/plan/planted.cc",
                   "// must not throw; getenv( is elsewhere\n/* std::cerr\n printf( */\n"
                   'const char* text = "throw printf( \\" std::cerr";\n'
                   'const char* raw = R"(throw "x" getenv)";\n'
                   "int n = 1'000'000; std::snprintf(buffer, 4, format);\n")
        self.expect_clean()

    def test_a_string_does_not_hide_what_follows(self):
        line = self.plant("src/plan/planted.cc", "char c = '\"'; throw c; // \"\n")
        self.expect("src/plan/planted.cc", line, ["throw"])

    def test_getenv_has_one_home(self):
        self.plant("src/base/env.cc", "\nauto v = std::getenv(name);\n")
        self.expect_clean()

    def test_native_code(self):
        line = self.plant("cmake/planted.cmake", "# never -march=native\nadd_compile_options(-march=native)\n")
        self.expect("cmake/planted.cmake", line + 1, ["-march=native"])

    def test_root_without_sources_is_bad_usage(self):
        with tempfile.TemporaryDirectory() as empty:
            code, found, error = run(empty)
        self.assertEqual((code, found), (2, []))
        self.assertIn("no src/", error)


if __name__ == "__main__":
    unittest.main()
