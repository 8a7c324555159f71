"""The documents against the tree: links lead somewhere, and the table of layers is the one that is checked."""

import importlib.machinery
import importlib.util
import pathlib
import re
import sys
import unittest

ROOT = pathlib.Path(sys.argv.pop()) if len(sys.argv) > 1 else pathlib.Path(__file__).parents[2]


def load_script(name):
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "scripts" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.dont_write_bytecode = True
    loader.exec_module(module)
    return module


class DocsTest(unittest.TestCase):
    def test_relative_links_lead_somewhere(self):
        links = 0
        for document in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
            for target in re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8")):
                if not re.match(r"[a-z]+:", target):
                    links += 1
                    with self.subTest(document=document.name, link=target):
                        self.assertTrue((document.parent / target).exists())
        self.assertGreater(links, 10)

    def test_demo_output_has_a_kept_digest(self):
        text = (ROOT / "README.md").read_text(encoding="utf-8")
        block = re.search(r"<!-- demo output: begin -->(.*?)<!-- demo output: end -->", text, re.S).group(1)
        order, digest = re.search(r"^ +digest (\w+):([0-9a-f]{32})$", block, re.M).groups()
        kept = (ROOT / "testdata/digests.txt").read_text(encoding="utf-8")
        self.assertIn(f"deepseek_v3_tiny 1 f32 {order} {digest}\n", kept)

    def test_table_of_layers_is_the_checked_one(self):
        layers = load_script("check_layers").LAYERS
        text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
        table = dict(re.findall(r"^\| `src/(\w+)/` \|[^|]*\| ([^|]*) \|$", text, re.M))
        above = set()
        for area, allowed in table.items():
            named = above if allowed == "all above" else set(allowed.split(", ")) - {"public"}
            with self.subTest(area=area):
                self.assertEqual(named, set(layers[area]))
            above = above | {area}
        self.assertEqual(set(table), set(layers))


if __name__ == "__main__":
    unittest.main()
