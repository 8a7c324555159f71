// Writes the seeds of every target: argosy_make_corpus FOLDER. Other files there stay as they are.
// That the kept ones are these is checked by replay_test.cc, CorpusHoldsTheSeeds.
#include <cstdio>
#include <filesystem>
#include <fstream>

#include "fuzz/fuzz_target.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: argosy_make_corpus FOLDER\n");
    return 2;
  }
  for (const argosy::testing::FuzzTarget* target : argosy::testing::all_targets()) {
    const std::filesystem::path folder = std::filesystem::path(argv[1]) / target->name;
    std::filesystem::create_directories(folder);
    for (const auto& [name, bytes] : target->seeds()) {
      std::ofstream(folder / name, std::ios::binary) << bytes;
    }
  }
  return 0;
}
