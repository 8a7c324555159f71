"""Router traces that the tool writes, read by Python alone: the zip container by zipfile (it checks CRCs), the arrays
by the rules of the npy format, and by numpy where there is one. And one that Python deflated, replayed by the tool.

    router_trace_test.py ARGOSY ROOT
"""

import ast
import json
import pathlib
import struct
import subprocess
import sys
import tempfile
import unittest
import zipfile

ARGOSY = sys.argv.pop(1)
ROOT = pathlib.Path(sys.argv.pop(1))
SEED = ROOT / "testdata/seed_example/seed_example.safetensors"
CODES = {"<i8": "q", "<i4": "i", "<f4": "f"}


def argosy(*words):
    done = subprocess.run([ARGOSY, *map(str, words)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def record(path):
    return argosy("route", "--input", f"{SEED}:tokens", "--gate", f"{SEED}:gate.weight", "--gate-bias",
                  f"{SEED}:gate.bias", "--preset", "mixtral", "--experts", 8, "--top-k", 2, "--ranks", 3,
                  "--record", path, "--json", "-")


def array_of(data):
    """Shape and values of an npy member, read by the format's own rules."""
    assert data[:8] == b"\x93NUMPY\x01\x00"
    end = 10 + struct.unpack("<H", data[8:10])[0]
    header = ast.literal_eval(data[10:end].decode("latin1"))
    assert end % 64 == 0 and data[end - 1:end] == b"\n" and header["fortran_order"] is False
    code = CODES[header["descr"]]
    return header["shape"], struct.unpack(f"<{(len(data) - end) // struct.calcsize(code)}{code}", data[end:])


class RouterTraceTest(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = pathlib.Path(self.folder.name, "trace.npz")
        self.routed = record(self.path)

    def tearDown(self):
        self.folder.cleanup()

    def test_members_are_arrays(self):
        with zipfile.ZipFile(self.path) as archive:
            self.assertIsNone(archive.testzip())
            arrays = {name: array_of(archive.read(name)) for name in archive.namelist()}
        self.assertEqual(arrays["rank.npy"], ((3,), (0, 1, 2)))
        self.assertEqual(arrays["num_tokens.npy"], ((3,), (1365, 1365, 1366)))
        self.assertEqual(arrays["num_experts.npy"], ((), (8,)))
        shape, ids = arrays["topk_idx.npy"]
        self.assertEqual(shape, (4096, 2))
        self.assertEqual([ids.count(e) for e in range(8)], self.routed["rows_per_expert"])
        shape, weights = arrays["topk_weights.npy"]
        self.assertEqual(shape, (4096, 2))
        for a, b in zip(weights[::2], weights[1::2]):
            self.assertAlmostEqual(a + b, 1, places=6)

    def test_numpy_loads_it(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("no numpy")
        with numpy.load(self.path, allow_pickle=False) as arrays:
            self.assertEqual(arrays["topk_idx"].dtype, numpy.int32)
            self.assertEqual(numpy.bincount(arrays["topk_idx"].ravel()).tolist(), self.routed["rows_per_expert"])

    def test_lines_are_json(self):
        lines = self.path.with_suffix(".jsonl")
        record(lines)
        ids = [e for line in lines.read_text().splitlines() for row in json.loads(line)["topk_idx"] for e in row]
        self.assertEqual([ids.count(e) for e in range(8)], self.routed["rows_per_expert"])

    def test_deflated_again_it_replays_the_same(self):
        other = self.path.with_name("deflated.npz")
        with zipfile.ZipFile(self.path) as stored, zipfile.ZipFile(other, "w", zipfile.ZIP_DEFLATED) as deflated:
            for name in stored.namelist():
                with deflated.open(name, "w", force_zip64=True) as member:  # as numpy does
                    member.write(stored.read(name))
        for path in (self.path, other):
            layer = argosy("route", "--replay", path, "--ranks", 3, "--json", "-")["layers"][0]
            self.assertEqual(layer["rows_per_expert"], self.routed["rows_per_expert"])
            self.assertEqual(layer["rows_per_rank"], self.routed["rows_per_rank"])


if __name__ == "__main__":
    unittest.main()
