// argosy memory, from outside: a row for each policy, every byte as predicted.
#include <gtest/gtest.h>

#include <algorithm>

#include "cli/cli_process.h"

namespace argosy::testing {
namespace {

TEST(Memory, EveryByteIsAsPredicted) {
  const CliResult result = run_cli({"memory", "--tokens", "40", "--experts", "8", "--top-k", "2",
                                    "--hidden", "64", "--width", "48"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_EQ(std::count(result.out.begin(), result.out.end(), '\n'), 3 + 7 + 1) << result.out;
  EXPECT_NE(result.out.find("| offload | offload | offload | offload |"), std::string::npos);
  EXPECT_NE(result.out.find("every byte as predicted"), std::string::npos);
}

}  // namespace
}  // namespace argosy::testing
